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

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import SettingError
from fedsynth.privacy.files import load_toml
from fedsynth.privacy.guard import Cap
from fedsynth.privacy.mechanism_facts import mechanism_facts
from fedsynth.validation import check_number

ANY = "any"
"""Approves every proposal."""


@dataclass(frozen=True)
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
            numbers, the least and the most.

    >>> Policy(methods=("feddm",), epsilon=8.0, delta=1e-5).open
    False
    """

    methods: tuple[str, ...] | None = None
    epsilon: float | None = None
    delta: float | None = None
    rounds: int | None = None
    open: bool = False
    classes: tuple[str, ...] | None = None
    height: int | None = None
    width: int | None = None
    channels: int | None = None
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        integers = ("rounds", "height", "width", "channels")
        for name in ("epsilon", "delta", *integers):
            value = getattr(self, name)
            if value is not None:
                check_number("policy", name, value, 0, math.inf, integer=name in integers)
            if value == 0:
                raise SettingError("policy", name, "must be above 0")
        if self.epsilon is not None and self.delta is None:
            raise SettingError(
                "policy", "delta", "must be set together with epsilon, which holds at this δ"
            )
        if self.delta is not None and self.delta >= 1:
            raise SettingError("policy", "delta", f"must be below 1, got {self.delta!r:.80}")
        if type(self.open) is not bool:
            raise SettingError("policy", "open", f"must be true or false, got {self.open!r:.80}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Policy:
        """Returns the policy of a parsed file.

        Raises:
            SettingError: an unknown name, or a value of another type: a typo must not allow more.
        """
        names = {item.name for item in fields(cls)}
        for name in mapping:
            if name not in names:
                raise SettingError("policy", name, f"is unknown; use {', '.join(names)}")
        values = dict(mapping)
        for name in {"methods", "classes"} & set(values):
            values[name] = _list(name, values[name])
            if not all(isinstance(item, str) for item in values[name]):
                raise SettingError(
                    "policy", name, f"must be a list of names, got {mapping[name]!r:.80}"
                )
        settings = values.get("settings", {})
        if not isinstance(settings, Mapping):
            raise SettingError("policy", "settings", "must be a table of settings")
        values["settings"] = {name: _list(name, allowed) for name, allowed in settings.items()}
        return cls(**values)

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
    def says_images(self) -> bool:
        """Returns whether the policy states everything that determines if images fit a run."""
        return None not in (self.classes, self.height, self.width, self.channels)

    def _other_images(self, proposal: Proposal) -> list[str]:
        spec = proposal.spec
        proposed = {
            "classes": spec.class_names,
            "height": spec.height,
            "width": spec.width,
            "channels": spec.channels,
        }
        allowed = {name: getattr(self, name) for name in proposed}
        return [
            f"{name} = {value!r:.80} differs from the owner's value"
            for name, value in proposed.items()
            if allowed[name] is not None and allowed[name] != value
        ]

    def objections(self, proposal: Proposal, *, identified: bool = False) -> list[str]:
        """Returns why the owner does not take part; empty: the owner does.

        The ledger is not considered here; it is checked at each charge.

        Args:
            proposal: the run's.
            identified: the other owners' keys are known, so that a server cannot invent clients.
        """
        run = proposal.settings
        privacy = run.privacy
        problems = self._other_images(proposal)
        if self.methods is not None and run.method.name not in self.methods:
            problems.append(f"method {run.method.name} is not allowed ({', '.join(self.methods)})")
        if self.rounds is not None and run.rounds > self.rounds:
            problems.append(f"{run.rounds} rounds are above the {self.rounds} allowed")
        if privacy is None:
            if not self.open:
                problems.append("runs without differential privacy are not allowed")
        else:
            if self.delta is not None and privacy.delta > self.delta:
                problems.append(f"δ = {privacy.delta:g} is above the {self.delta:g} allowed")
            mechanism = privacy.mechanism or next(iter(run.method.dp_mechanisms), "")
            if not self.open and mechanism and not mechanism_facts(mechanism).guaranteed:
                problems.append(f"mechanism {mechanism} has no guarantee")
            shares = run.method.noise_shares(run.partition.clients)
            if shares > 1 and not identified and "method.aggregation" not in self.settings:
                problems.append(
                    f"each client adds only its share of the noise of {shares} clients, and "
                    "a server that invents clients could see an upload with only that "
                    "noise: verify the other owners' keys, or allow it "
                    '("method.aggregation" = ["secure"])'
                )
        sections = run.to_mapping()
        for name, allowed in self.settings.items():
            section, _, key = name.partition(".")
            value = sections.get(section, {}).get(key)
            if not _allows(allowed, value):
                problems.append(f"{name} = {value!r:.80} is not allowed")
        return problems


def _list(name: str, value: Any) -> tuple[Any, ...]:
    plain = (str, int, float, bool)
    if not isinstance(value, list) or not value or not all(type(item) in plain for item in value):
        raise SettingError("policy", name, f"must be a list of allowed values, got {value!r:.80}")
    return tuple(value)


def _allows(allowed: tuple[Any, ...], value: Any) -> bool:
    """Returns whether a setting's value is in a list, or between two numbers."""
    if len(allowed) == 2 and all(_is_number(item) for item in allowed):
        return _is_number(value) and allowed[0] <= value <= allowed[1]
    return any(type(item) is type(value) and item == value for item in allowed)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


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
    def cap(self) -> Cap | None:
        """The budget of all runs together, in addition to each run's own cap."""
        if self.policy is None or self.policy.epsilon is None or self.policy.delta is None:
            return None
        return Cap(self.policy.epsilon, self.policy.delta)

    def objections(self, proposal: Proposal, *, identified: bool = False) -> list[str]:
        """Returns why the owner does not take part; empty: the owner does."""
        if self.policy is not None:
            objections = self.policy.objections(proposal, identified=identified)
            if objections or not self.approved:
                return objections
        if {ANY, proposal.agreement} & self.approved:
            return []
        return ["its owner has not approved this run"]
