"""Checks that reject the settings of an invalid run before the run begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsynth.config.participation import active_clients
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import PublicImages, VaryingReleases, upload_types
from fedsynth.core.messages import privacy_of_fields
from fedsynth.core.method import Method
from fedsynth.core.sums import SummedUploads, sums_securely
from fedsynth.data.registry import DatasetSpec, is_published, share_images
from fedsynth.errors import (
    PrivacySettingError,
    SettingError,
    UnaccountedReleaseError,
    one_line,
    unknown_value,
)
from fedsynth.models.registry import UNET
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.privacy.settings import PrivacySettings

UNIT_IS_UNSET = (
    "must be set, because the data assign each record to a person. Set it to 'user' to protect "
    "whole persons, or to 'record' to protect single records, and keep it in all runs on these data"
)


def mechanism_of(method: Method, privacy: PrivacySettings) -> str:
    """Returns the name of the privacy mechanism that a run uses.

    It is the mechanism in the privacy settings, or by default the first one that the method
    declares.

    Raises:
        UnknownNameError: if the method does not have the requested mechanism.
    """
    mechanism = privacy.mechanism or method.dp_mechanisms[0]
    if mechanism not in method.dp_mechanisms:
        raise unknown_value(
            "privacy", "mechanism", mechanism, method.dp_mechanisms, f" for {method.name}"
        )
    return mechanism


def check_unit(privacy: PrivacySettings, spec: DatasetSpec, *, has_users: bool = False) -> None:
    """Raises an error if custom data have known users, but the run sets no privacy unit.

    Args:
        privacy: the privacy settings of the run.
        spec: the specification of the data. It may state a number of users.
        has_users: whether the caller passed the user of each record.

    Raises:
        PrivacySettingError: if the unit is not set. The unit of the first run is also that of all
            later runs on these data.
    """
    if privacy.unit is None and (spec.groups or has_users) and not is_published(spec):
        raise PrivacySettingError("privacy", "unit", UNIT_IS_UNSET)


def most_records(spec: DatasetSpec, privacy: PrivacySettings) -> int:
    """Returns a public upper bound on the total number of records.

    Raises:
        PrivacySettingError: if the bound is below the number of records that the data set declares.
    """
    limit = privacy.max_records or spec.train_size
    if limit < spec.train_size:
        reason = f"is below the {spec.train_size} declared records. Raise it"
        raise PrivacySettingError("privacy", "max_records", reason, value=limit)
    return limit


def check_kind(settings: RunSettings, spec: DatasetSpec) -> None:
    """Raises an error if a method or model does not support the data set's tokens or masks.

    Raises:
        SettingError: the data are tokens, and the method needs images; or the data have masks, and
            the method needs classes or the model does not segment; or the model segments, and the
            data have no masks.
    """
    method, names = settings.method, {settings.model.name, *settings.model.client_names}
    if spec.vocabulary and method.features_refusal:
        reason = (
            f"needs images, but data set {spec.name} has token sequences. Use fedavg, fedprox or "
            "qffl"
        )
        raise SettingError("run", "method", reason, value=method.name)
    if not spec.has_masks:
        if UNET in names and not spec.vocabulary:
            reason = (
                f"needs a data set with masks, but {spec.name} has classes. Use convnet instead"
            )
            raise SettingError("model", "name", reason, value=UNET)
        return
    if method.masks_refusal:
        reason = (
            f"does not support the masks of {spec.name}, because {method.masks_refusal}. "
            "Use fedavg, fedprox, fedbn, fedfa-plus or fedharmo"
        )
        raise SettingError("run", "method", reason, value=method.name)
    if names != {UNET} or settings.model.projection:
        reason = (
            f"and model.projection={settings.model.projection} do not support the masks of "
            f"{spec.name}. Set model.name={UNET} and model.projection=0"
        )
        raise SettingError("model", "name", reason, value=settings.model.name)


def check_own_noise(plans: Sequence[ReleasePlan]) -> None:
    """Checks that each client adds the full noise to its own uploads.

    Without secure aggregation, the server sees each upload, so a part of the noise is not enough.

    Raises:
        PrivacySettingError: if the plans divide the noise among several clients. The message states
            what to set.
    """
    shares = max(plan.shares for plan in plans)
    if shares > 1:
        reason = (
            f"would leave each upload with only 1/{shares} of the noise, but the deployment uses "
            "no secure sums. Set method.aggregation=own"
        )
        raise PrivacySettingError("method", "aggregation", reason, value="secure")


def check_method(method: Method) -> None:
    """Raises an error if a method with unprotected uploads is used with differential privacy.

    Each field of an upload must be public or be released by a privacy mechanism.

    Raises:
        UnaccountedReleaseError: if a field is not protected, if the method has no mechanism, or if
            a metric has no valid declaration. The message names the method and the reason.
    """
    declared = {}
    for upload in upload_types(method):
        declared.update(privacy_of_fields(upload))
    unprotected = []
    for name, (kind, _) in declared.items():
        if kind not in ("released", "public"):
            unprotected.append(f"{name} ({kind})")
    if unprotected or not method.dp_mechanisms:
        fields = ", ".join(unprotected)
        why = method.refusal or f"no mechanism protects the upload fields {fields}"
        raise UnaccountedReleaseError(f"{method.name} cannot run with differential privacy: {why}")
    labels = getattr(method, "metric_privacy", {})
    try:
        for label in labels.values():
            label.fits(None)  # pydantic may refuse the declared type with any exception
    except Exception as error:
        raise UnaccountedReleaseError(
            f"{method.name}.metric_privacy is not valid: {one_line(error)}. Declare each metric as "
            "in {'norm': released('of a released model', float)}, with a type of JSON"
        ) from None


def check_participation(settings: RunSettings, plans: Sequence[ReleasePlan]) -> None:
    """Raises an error if partial participation would break the privacy guarantee.

    The guarantee fails if a client's releases vary between rounds, or if a round has too few
    clients to add all of the noise.
    """
    if settings.participation == 1:
        return  # a method knows all clients, and determines itself how many it counts on
    method = settings.method
    if isinstance(method, VaryingReleases):
        reason = (
            f"must be 1 with {method.name}, because a client's releases vary between rounds. Set "
            "run.participation=1"
        )
        raise SettingError("run", "participation", reason, value=settings.participation)
    shares = max(plan.shares for plan in plans)
    active = active_clients(settings.partition.clients, settings.participation)
    if shares > 1 and shares >= active:
        reason = (
            f"selects {active} clients in each round, but more than {shares} must add noise. "
            f"Increase it, or set method.honest below {active}"
        )
        raise SettingError("run", "participation", reason, value=settings.participation)


def refuse_own_proxy(method: Method, spec: DatasetSpec) -> None:
    """Checks that a private run does not distil on images from its clients' data set."""
    if isinstance(method, PublicImages) and share_images(method.public_images(), spec.name):
        raise UnaccountedReleaseError(
            f"{method.name} would distil on {method.public_images()}, but these images may be in "
            f"the clients' data set {spec.name}. Set method.proxy to noise or another data set"
        ).with_code("release.proxy")


def fewest(method: SummedUploads, taking: int, clients: int, *, private: bool) -> int:
    """Returns the minimum number of uploads in a sum that the server sees.

    This number is a majority of the clients in a round. If each client adds 1/H of the noise, the
    number is also at least H. In a private run of several clients, the number is at least H + 1,
    because one client may be the attacker and knows the noise that this client added.

    Args:
        method: a method whose server sees only sums of uploads.
        taking: the number of clients in a round.
        clients: K, the number of all clients.
        private: whether the run has differential privacy.
    """
    observers = int(private and clients > 1)
    return max(taking // 2 + 1, method.noise_shares(clients) + observers)


def check_quorum(settings: RunSettings) -> None:
    """Raises an error if `participation` and `quorum` could leave too few clients for a secure sum.

    Raises:
        SettingError: if a setting is too small. The message states what to set.
    """
    if not sums_securely(settings.method):
        return
    taking = active_clients(settings.partition.clients, settings.participation)
    private = settings.privacy is not None
    needed = fewest(settings.method, taking, settings.partition.clients, private=private)
    if needed > taking:
        reason = f"selects {taking} clients, but a secure sum needs {needed}. Increase it"
        raise SettingError("run", "participation", reason, value=settings.participation)
    if math.ceil(settings.quorum * taking - 1e-9) < needed:
        enough = math.ceil(1000 * needed / taking) / 1000
        reason = (
            f"is too low, because a secure sum needs {needed} of a round's {taking} clients. Set "
            f"it to at least {enough:g}"
        )
        raise SettingError("run", "quorum", reason, value=settings.quorum)
