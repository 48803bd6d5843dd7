"""A data owner's policy, and the owner's decision on a proposed run.

A policy is a TOML file that the owner writes. Settings that the policy does not name are not
limited, with one exception: runs without differential privacy need `open = true`
(`docs/deployment.md`).

In a secure sum, each client may add only a part of the noise. The node accepts this only if it
knows the other owners' keys, or if the policy names `"method.aggregation"`. The reason is that a
server which invents clients could otherwise see an upload that has only this part of the noise.

Before the client joins a run, the owner sees the planned releases and their cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from fedsynth.core.capabilities import upload_types
from fedsynth.core.messages import privacy_of_fields
from fedsynth.core.sums import sums_securely
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import FedsynthError, SettingError, faults_as, unknown_name
from fedsynth.federation.context import public_context
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.files import load_toml
from fedsynth.methods import METHODS
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.mechanisms import EpsilonCap
from fedsynth.privacy.releases import Release
from fedsynth.results.report_facts import headline, pluralize
from fedsynth.validation import LARGEST

# Approves every proposal.
ANY = "any"

Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Values = Annotated[tuple[bool | int | float | str, ...], Field(strict=False, min_length=1)]
Positive = Annotated[int, Field(gt=0, le=LARGEST)]


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Policy:
    """A data owner's limits on the runs in which the owner's node takes part.

    Args:
        methods: the names of the allowed methods. None: all methods are allowed.
        epsilon: the privacy budget of all runs on the owner's records together. It applies in
            addition to each run's own cap, and is also enforced at each charge. None: only the caps
            of the runs apply.
        delta: the δ at which `epsilon` holds, and the largest δ that a run may have. It is required
            with `epsilon`, because the server sets a run's δ, and the same releases have a smaller
            ε at a larger δ.
        rounds: the largest number of rounds of a run. None: no limit.
        open: whether runs without a privacy guarantee are allowed.
        classes: the classes of the images, in the order that a run uses. None: not stated.
        height: the height of the images in pixels. None: not stated.
        width: the width of the images in pixels. None: not stated.
        channels: the number of channels, 1 or 3. None: not stated.
        settings: maps "section.key" to the allowed values of that setting. The values are a list,
            or two numbers that are the minimum and the maximum.

    >>> Policy(methods=("feddm",), epsilon=8.0, delta=1e-5).open
    False
    """

    methods: Names | None = None
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    rounds: Positive | None = None
    open: bool = False
    classes: Names | None = None
    height: Positive | None = None
    width: Positive | None = None
    channels: Positive | None = None
    settings: Mapping[str, Values] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Policy:
        for name in self.methods or ():
            if name not in METHODS:
                raise ValueError(str(unknown_name("method", name, METHODS)))
        if self.epsilon is not None and self.delta is None:
            raise ValueError(
                "delta is missing, but epsilon requires it. Set delta to a small number, such as "
                "1e-5"
            )
        return self

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Reads a policy from a file.

        Raises:
            SettingError: if the file cannot be read, is not TOML, has an unknown name or a value of
                the wrong type. Unknown names are errors so that a typo cannot allow more than the
                owner intended.
        """
        invalid = "is not a valid policy"
        try:
            with faults_as(partial(SettingError, None, str(path)), invalid):
                return cls(**load_toml(path))
        except (OSError, ValueError) as error:
            raise SettingError(None, str(path), f"{invalid}: {error}") from None

    @property
    def describes_images(self) -> bool:
        """Returns True if the policy fixes the images' classes, height, width and channels.

        If so, only the policy determines whether the images fit a run.
        """
        return None not in (self.classes, self.height, self.width, self.channels)

    def objections(self, proposal: Proposal, *, identified: bool = False) -> list[str]:
        """Returns the reasons why the policy forbids a run, or an empty list if it allows the run.

        The ledger is not checked by this method, but at each charge.

        Args:
            proposal: the proposed run.
            identified: whether the other owners' keys are known, so that a server cannot invent
                clients.
        """
        run = proposal.settings
        objections = self._image_objections(proposal)
        if self.methods is not None and run.method.name not in self.methods:
            allowed = ", ".join(self.methods)
            objections.append(f"the owner allows only {allowed}, not {run.method.name}")
        if self.rounds is not None and run.rounds > self.rounds:
            objections.append(f"the owner allows at most {self.rounds} rounds, not {run.rounds}")
        objections += self._privacy_objections(proposal, identified)
        sections = run.to_mapping()
        for name, values in self.settings.items():
            section, _, key = name.partition(".")
            value = sections.get(section, {}).get(key)
            if value is None:
                objections.append(f"the run has no {name}, which the owner's policy limits")
            elif not _allows(values, value):
                objections.append(f"the owner does not allow {name} = {value!r:.80}")
        return objections

    def _image_objections(self, proposal: Proposal) -> list[str]:
        spec = proposal.spec
        pairs = {
            "classes": (self.classes, spec.class_names),
            "height": (self.height, spec.height),
            "width": (self.width, spec.width),
            "channels": (self.channels, spec.channels),
        }
        return [
            f"the run's {name} = {proposed!r:.80} does not match the owner's policy"
            for name, (stated, proposed) in pairs.items()
            if stated not in (None, proposed)
        ]

    def _privacy_objections(self, proposal: Proposal, identified: bool) -> list[str]:
        method = proposal.settings.method
        privacy = proposal.settings.privacy
        if privacy is None:
            if self.open:
                return []
            return ["the owner does not allow runs without differential privacy"]
        objections = []
        if self.delta is not None and privacy.delta > self.delta:
            objections.append(f"the owner allows δ up to {self.delta:g}, not {privacy.delta:g}")
        mechanism = privacy.mechanism or next(iter(method.dp_mechanisms), "")
        if not self.open and mechanism and not mechanism_facts(mechanism).guaranteed:
            objections.append(f"the run's mechanism {mechanism} has no privacy guarantee")
        shares = 1
        if sums_securely(method):
            shares = method.noise_shares(proposal.settings.partition.clients)
        if shares > 1 and not identified and "method.aggregation" not in self.settings:
            objections.append(
                f"each client adds only 1/{shares} of the noise, so a server with false clients "
                "could see an upload with only this part. Use --identities with the other owners' "
                'keys, or allow "method.aggregation" = ["secure"] in the policy'
            )
        return objections


def _allows(allowed: tuple[Any, ...], value: Any) -> bool:
    """Returns True if a setting's value is allowed.

    `allowed` is a list of values, or the minimum and the maximum of a number.
    """
    if [type(item) in (int, float) for item in allowed] == [True, True]:
        return type(value) in (int, float) and allowed[0] <= value <= allowed[1]
    return any(type(item) is type(value) and item == value for item in allowed)


@dataclass(frozen=True)
class Owner:
    """Decides for a data owner whether to accept a proposed run.

    The decision follows the owner's policy, the owner's manual approvals, or both.

    Args:
        policy: the owner's policy. None: only runs that the owner has approved are accepted.
        approved: the agreement hashes that the owner has approved by hand. `ANY` approves every
            proposal.
    """

    policy: Policy | None = None
    approved: frozenset[str] = frozenset()

    @property
    def cap(self) -> EpsilonCap | None:
        """The privacy budget for all runs together, in addition to each run's own cap."""
        policy = self.policy
        if policy is None or policy.epsilon is None or policy.delta is None:
            return None
        return EpsilonCap(policy.epsilon, policy.delta)

    def objections(self, proposal: Proposal, *, identified: bool = False) -> list[str]:
        """Returns the reasons why the owner refuses a run, or an empty list if the owner accepts
        it.
        """
        if self.policy is not None:
            objections = self.policy.objections(proposal, identified=identified)
            if objections or not self.approved:
                return objections
        if {ANY, proposal.agreement} & self.approved:
            return []
        return ["the owner has not approved this run"]


def describe_request(
    proposal: Proposal,
    number: int,
    rows: tuple[Release, ...] = (),
    cap: EpsilonCap | None = None,
) -> list[str]:
    """Describes a proposed run, its releases and their cost in text for the owner.

    Args:
        proposal: the server's proposal.
        number: the index of the client.
        rows: the releases in the client's current ledger.
        cap: the owner's budget. If it ends before the run, the text states the number of rounds.
    """
    run = proposal.settings
    method = run.method
    lines = [
        f"run {proposal.run} asks client {number} of {run.partition.clients}: {method.name}, "
        f"{pluralize(run.rounds, 'round')}, data set {proposal.spec.name}, model {run.model.name}",
        f"  to approve exactly these settings, use --approve {proposal.agreement}",
    ]
    masking = ", masked so that the server sees only sums" * sums_securely(method)
    for upload in upload_types(method):
        kinds = privacy_of_fields(upload).items()
        fields = [name + f" ({kind})" * bool(run.privacy) for name, (kind, _) in kinds]
        lines.append(f"  the client sends in each round{masking}: {', '.join(fields)}")
    if run.privacy is None:
        return [
            *lines,
            "  the client's uploads are not protected, because the run has no differential "
            "privacy. No later run on these records can state an ε",
        ]
    history = History("this client", rows)
    try:  # planned from the proposal, because σ is sent only after all clients have joined
        context = public_context(run, proposal.spec, torch.device("cpu"))
        plan = PrivacyPlan.make(run, context, [history] * run.partition.clients)
        lines += [f"  {line}" for line in headline(plan, simulated=False)]
        if cap is not None and plan.facts.guaranteed:
            allowed, planned = plan.allowed_rounds(cap), plan.most_rounds()
            if allowed < planned:
                lines.append(
                    f"  warning: the policy's epsilon = {cap.epsilon:g} (at δ = {cap.delta:g}) "
                    f"allows only {allowed} of {pluralize(planned, 'round')}. The client will "
                    "refuse the others. To allow them, increase epsilon in the policy"
                )
        return lines
    except FedsynthError as error:
        return [*lines, f"  the client cannot take part: {error}"]
