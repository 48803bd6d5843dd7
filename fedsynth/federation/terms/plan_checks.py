"""What a private run is refused for before it is planned, or a method for before it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import privacy_of_fields
from fedsynth.core.method import Method
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError, unknown_value
from fedsynth.federation.terms.participation import active_clients
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.models.registry import is_own_model
from fedsynth.privacy.dpsgd import check_example_gradients
from fedsynth.privacy.errors import PrivacySettingError, UnaccountedReleaseError
from fedsynth.privacy.plans import PrivatePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator


def mechanism_of(method: Method, given: PrivacySettings) -> str:
    """The mechanism that is asked for, or the method's first.

    Raises:
        UnknownNameError: the method has no such one.
    """
    mechanism = given.mechanism or method.protects[0]
    if mechanism not in method.protects:
        raise unknown_value(
            "privacy", "mechanism", mechanism, method.protects, f" for {method.name}"
        )
    return mechanism


def most_records(spec: DatasetSpec, given: PrivacySettings) -> int:
    """The public bound on the records of all clients.

    Raises:
        PrivacySettingError: it is below what the data set declares.
    """
    most = spec.train_size if given.max_records is None else given.max_records
    if most < spec.train_size:
        raise PrivacySettingError(
            "privacy",
            "max_records",
            f"is below the {spec.train_size} records that the data set declares",
            value=most,
        )
    return most


def refuse_absence(settings: RunSettings) -> None:
    """Refuses clients that miss rounds of a method whose rounds release different things."""
    method = settings.method
    if not method.even_rounds and settings.participation < 1:
        raise SettingError(
            "run",
            "participation",
            f"must be 1 with {method.name}: its rounds release different things of every client",
            value=settings.participation,
        )


def check_own_noise(plans: Sequence[PrivatePlan]) -> None:
    """Refuses plans in which a client adds a part of the noise alone, of a method whose uploads go
    over machines as they are: the server sees each of them.

    Raises:
        PrivacySettingError: says what to set.
    """
    shared = [plan for plan in plans if plan.shares > 1]
    if shared:
        raise PrivacySettingError(
            "method",
            "aggregation",
            "must be own over machines: the sum of this method's uploads is not made under masks, "
            f"and each would carry the noise of 1 of {shared[0].shares} clients",
            value="secure",
        )


def check_method(method: Method) -> None:
    """Refuses a method that uploads anything which is neither released nor public.

    Raises:
        UnaccountedReleaseError: names the method, the field and the reason.
    """
    declared: Mapping[str, tuple[str, str]] = {
        **privacy_of_fields(method.upload),
        **(privacy_of_fields(method.first_upload) if method.first_upload else {}),
    }
    bad = [
        f"{name} ({kind})"
        for name, (kind, _) in declared.items()
        if kind not in ("released", "public")
    ]
    if bad or not method.protects:
        why = (
            method.refusal or f"its upload has fields that no mechanism protects: {', '.join(bad)}"
        )
        raise UnaccountedReleaseError(f"{method.name} cannot run with differential privacy: {why}")


def refuse_noise_of_absent_clients(settings: RunSettings, plans: Sequence[PrivatePlan]) -> None:
    """Refuses shared noise of which a round's clients would always lack a part."""
    if settings.participation == 1:
        return  # a method knows all clients, and says itself how many it counts on
    shares = max(plan.shares for plan in plans)
    there = active_clients(settings.partition.clients, settings.participation)
    if shares > 1 and shares >= there:
        raise SettingError(
            "run",
            "participation",
            f"lets {there} of {settings.partition.clients} clients take part in a round, and the "
            f"noise is shared by {shares} others than the one who is attacked: take "
            f"method.honest of less than {there}, more participation, or each client's own noise",
            value=settings.participation,
        )


def check_custom_model(
    settings: RunSettings, context: RoundContext, plans: Sequence[PrivatePlan]
) -> None:
    """Refuses a custom model that DP-SGD cannot train."""
    if not (settings.method.model_sees_data and is_own_model(settings.model)):
        return
    if any(plan.mechanism == "dp-sgd" for plan in plans):
        generator = torch_generator(0, "images for a custom model")
        images = torch.rand(2, *context.spec.image_shape, generator=generator).to(context.device)
        check_example_gradients(context.architecture, images)


def refuse_own_proxy(method: Method, spec: DatasetSpec) -> None:
    """Refuses public images to distil on that are the clients' own."""
    if method.public_images() == spec.name:
        raise UnaccountedReleaseError(
            f"{method.name} cannot distil on {spec.name} with differential privacy: those are the "
            "clients' own images; name public ones (method.proxy=noise, or another data set)"
        )
