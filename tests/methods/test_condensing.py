"""What condensing methods share, and one of one's own with its own upload and charge."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.data.images import ImageData, normalise
from fedsynth.errors import SettingError
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.shared.condensing import CondensingMethod
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.settings import PrivacySettings
from tests.digits import SPEC, charged, context, digits, sent

OWN: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "own_condensation.py")
)
LABELS = np.array([0] * 12 + [1] * 15 + [3] * 3)
CONDENSING = [name for name in METHODS if issubclass(method_class(name), CondensingMethod)]
TINY: dict[str, Any] = {"ipc": 2, "iterations": 2, "server_epochs": 1}


def records(extra: np.ndarray | None = None, label: int = 0) -> ImageData:
    if extra is None:
        return digits(LABELS)
    return digits(np.append(LABELS, label), extra)


def round_context(
    privacy: PrivacySettings | None = None, *, compiled: bool = False
) -> RoundContext:
    return context(privacy, compiled=compiled)


def open_clients() -> ExactClientView:
    return ExactClientView([0], records(), [torch.arange(30)])


def private(method: Method, ctx: RoundContext, ledger: Ledger | None = None) -> PrivateClientView:
    return charged(method, ctx, records(), None, ledger and [ledger])


# -------------------------------------------------------------------------------- the compile rule


@pytest.mark.parametrize("name", [*CONDENSING, "own"])
def test_private_clients_are_never_compiled(name: str, compiled: list[str]) -> None:
    """One record more would move others to another kernel. Catches: a method's own rule."""
    method = (OWN["ProtoDM"] if name == "own" else method_class(name)).from_mapping(TINY)
    for mechanism in method.dp_mechanisms:
        privacy = PrivacySettings(noise_multiplier=1.0, mechanism=mechanism)
        if mechanism != "paper":  # which sees open clients, and guarantees nothing
            ctx = round_context(privacy, compiled=True)
            sent(method, ctx, private(method, ctx))
    assert compiled == []
    sent(method, round_context(), open_clients())
    assert compiled == []  # nor anybody who did not ask for it
    sent(method, round_context(compiled=True), open_clients())
    assert sorted(compiled) == ["_back", "_between", "_embed"]


# --------------------------------------------------------------------------- a custom method


def test_the_servers_loss_is_the_cross_entropy_and_the_prototypes_pull() -> None:
    ctx = round_context()
    method = OWN["ProtoDM"](alignment=0.7, ipc=2, iterations=2)
    (actual,) = sent(method, ctx, open_clients())
    images = normalise(records().images[:4], SPEC)
    labels = torch.tensor([0, 1, 1, 2])  # class 2 has no prototype: no pull
    loss = method.loss({0: actual})(ctx.architecture, images, labels)
    with torch.no_grad():
        h = ctx.architecture.embed(images).double().numpy()  # type: ignore[operator]
        logits = ctx.architecture(images).double().numpy()
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    plain = -np.log(p[np.arange(4), labels.numpy()]).mean()
    target = actual.prototypes.double().numpy()
    pull = sum(((h[i] - target[labels[i]]) ** 2).mean() for i in range(3)) / 4
    assert loss.item() == pytest.approx(plain + 0.7 * pull, rel=1e-4)


def test_what_it_charges_is_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of images, one sum of embeddings, one of counts; charged before they are drawn."""
    released: list[int] = []
    original = GaussianSumMechanism.release
    monkeypatch.setattr(
        GaussianSumMechanism, "release", lambda self: released.append(1) or original(self)
    )
    ledger = Ledger("0")
    method = OWN["ProtoDM"].from_mapping(TINY)
    ctx = round_context(PrivacySettings(noise_multiplier=2.0))
    sent(method, ctx, private(method, ctx, ledger))
    assert sorted((r.quantity, r.steps, r.sensitivity) for r in ledger.releases) == [
        ("class counts", 1, 1.0),
        ("class sums of embeddings", 1, 5.0),
        ("synthetic images", 2, 0.25 * 26**0.5),
    ]
    assert len(released) == sum(r.steps for r in ledger.releases)
    planned = method.release_plans(PrivacySettings(noise_multiplier=2.0), ctx)
    assert {plan.release(1, 2.0) for plan in planned} == set(ledger.releases)


def test_a_mechanism_that_is_not_known_is_refused_where_it_would_go_unnoticed() -> None:
    """It would match on another's releases."""
    privacy = PrivacySettings(noise_multiplier=1.0, mechanism="mine")
    method = method_class("feddm").from_mapping(TINY)
    with pytest.raises(SettingError, match=r"privacy\.mechanism must be .*'mine'"):
        method.release_plans(privacy, round_context(privacy))
