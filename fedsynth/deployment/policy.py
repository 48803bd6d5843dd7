"""A data owner's policy: a file that the owner writes, and the decision on a proposal.

A policy is TOML. It does not limit what it does not name, except for runs without differential
privacy, which it allows only with `open = true`:

    methods = ["feddm", "fedaf"]     # names of methods
    epsilon = 8.0                    # the budget of all runs on these records together ...
    delta = 1e-5                     # ... at this δ, which is also a run's largest δ
    rounds = 20                      # a run's largest number of rounds
    open = false                     # whether runs without differential privacy are allowed

    classes = ["healthy", "ill"]     # what a run may know of the images: a run that differs
    height = 64                      # is refused before any is read
    width = 64
    channels = 1

    [settings]                       # any other setting: allowed values, or [least, most]
    "model.name" = ["convnet", "linear"]
    "model.width" = [1, 128]

Noise that clients share, each adding a part, is allowed if the other owners' keys are known, or if
the policy names `"method.aggregation"`: a server that invents clients sees an upload with only this
part of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import SettingError
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.files import load_toml
from fedsynth.privacy.guard import EpsilonCap
from fedsynth.validation import LARGEST

ANY = "any"
"""Approves every proposal."""
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Values = Annotated[tuple[bool | int | float | str, ...], Field(strict=False, min_length=1)]
Positive = Annotated[int, Field(gt=0, le=LARGEST)]


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Policy:
    """An owner's policy.

    Args:
        methods: names; None: all.
        epsilon: the budget of all runs on the owner's records together, whatever a run's own cap
            is. It is enforced at each charge, too. None: only the runs' own caps apply.
        delta: the δ of that ε, and the largest δ of a run. An ε without its δ is meaningless:
            with a larger δ, which the server sets, the same releases have a smaller ε.
        rounds: the most rounds of a run.
        open: whether runs without a guarantee are allowed.
        classes: the images' classes, in a run's order; None: not stated.
        height: of the images, in pixels; None: not stated.
        width: of the images, in pixels; None: not stated.
        channels: 1 or 3; None: not stated.
        settings: by "section.key" the allowed values of a setting: a list of values, or two
            numbers, the minimum and the maximum.

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
    def _delta_of_epsilon(self) -> Policy:
        if self.epsilon is not None and self.delta is None:
            raise ValueError("epsilon needs delta: the budget holds at this δ")
        return self

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Policy:
        """Returns the policy of a parsed file.

        Raises:
            SettingError: an unknown name, or a value of another type: a typo must not allow more.
        """
        try:
            return cls(**mapping)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))
            reason = f"is not valid: {first['msg']:.200}"
            raise SettingError("policy", f"{name:.80}", reason) from None

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Returns the policy in a file.

        Raises:
            SettingError: it cannot be read, is not TOML, or as `from_mapping`.
        """
        try:
            table = load_toml(path)
        except (OSError, ValueError) as error:
            raise SettingError(None, str(path), f"is not a valid policy: {error}") from None
        return cls.from_mapping(table)

    @property
    def describes_images(self) -> bool:
        """Returns whether the policy states everything that determines if images fit a run."""
        return None not in (self.classes, self.height, self.width, self.channels)

    def objections(self, proposal: Proposal, *, identified: bool = False) -> list[str]:
        """Returns why the owner does not take part; empty: the owner does.

        The ledger is not considered here; it is checked at each charge.

        Args:
            proposal: the run's.
            identified: the other owners' keys are known, so that a server cannot invent clients.
        """
        run = proposal.settings
        objections = self._image_objections(proposal)
        if self.methods is not None and run.method.name not in self.methods:
            allowed = ", ".join(self.methods)
            objections.append(f"method {run.method.name} is not allowed ({allowed})")
        if self.rounds is not None and run.rounds > self.rounds:
            objections.append(f"{run.rounds} rounds are above the {self.rounds} allowed")
        objections += self._privacy_objections(proposal, identified)
        sections = run.to_mapping()
        for name, values in self.settings.items():
            section, _, key = name.partition(".")
            value = sections.get(section, {}).get(key)
            if not _allows(values, value):
                objections.append(f"{name} = {value!r:.80} is not allowed")
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
            f"{name} = {proposed!r:.80} differs from the owner's value"
            for name, (stated, proposed) in pairs.items()
            if stated not in (None, proposed)
        ]

    def _privacy_objections(self, proposal: Proposal, identified: bool) -> list[str]:
        method = proposal.settings.method
        privacy = proposal.settings.privacy
        if privacy is None:
            if self.open:
                return []
            return ["runs without differential privacy are not allowed"]
        objections = []
        if self.delta is not None and privacy.delta > self.delta:
            objections.append(f"δ = {privacy.delta:g} is above the {self.delta:g} allowed")
        mechanism = privacy.mechanism or next(iter(method.dp_mechanisms), "")
        if not self.open and mechanism and not mechanism_facts(mechanism).guaranteed:
            objections.append(f"mechanism {mechanism} has no guarantee")
        shares = method.noise_shares(proposal.settings.partition.clients)
        if shares > 1 and not identified and "method.aggregation" not in self.settings:
            objections.append(
                f"each client adds only its share of the noise of {shares} clients, and "
                "a server that invents clients could see an upload with only that "
                "noise: verify the other owners' keys, or allow it "
                '("method.aggregation" = ["secure"])'
            )
        return objections


def _allows(allowed: tuple[Any, ...], value: Any) -> bool:
    """Returns whether a setting's value is in a list, or between two numbers."""
    if [type(item) in (int, float) for item in allowed] == [True, True]:
        return type(value) in (int, float) and allowed[0] <= value <= allowed[1]
    return any(type(item) is type(value) and item == value for item in allowed)


@dataclass(frozen=True)
class Owner:
    """Decides on a proposal: by a policy, an approval of one agreement, or both.

    Args:
        policy: the owner's; None: only approved runs are accepted.
        approved: agreements that were approved by hand; `ANY` in it approves all.
    """

    policy: Policy | None = None
    approved: frozenset[str] = frozenset()

    @property
    def cap(self) -> EpsilonCap | None:
        """The budget of all runs together, in addition to each run's own cap."""
        if self.policy is None or self.policy.epsilon is None or self.policy.delta is None:
            return None
        return EpsilonCap(self.policy.epsilon, self.policy.delta)

    def objections(self, proposal: Proposal, *, identified: bool = False) -> list[str]:
        """Returns why the owner does not take part; empty: the owner does."""
        if self.policy is not None:
            objections = self.policy.objections(proposal, identified=identified)
            if objections or not self.approved:
                return objections
        if {ANY, proposal.agreement} & self.approved:
            return []
        return ["its owner has not approved this run"]
