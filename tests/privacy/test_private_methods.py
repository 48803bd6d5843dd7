"""Tests of private methods from end to end: released statistics have the public scale, and clients
reject invalid requests and settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import ModelParameters
from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView, Group
from fedsynth.core.method import Method
from fedsynth.core.uploads import check_numbers
from fedsynth.data.partition import partition
from fedsynth.evaluation.classification import MEASURES
from fedsynth.methods.fedaf import FedAF
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.feddm import FedDM
from fedsynth.privacy.errors import PrivacySettingError, RequestRefusedError
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import NO_LEDGER, PrivacySettings
from fedsynth.simulation.simulate import simulate
from tests.digits import digits, private_clients, round_context
from tests.quick_runs import read_rows

START = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
FEDDM = FedDM(ipc=2, iterations=1, image_lr=1.0, min_examples=1)
FEDAVG = FedAvg(local_epochs=1, batch=100, lr=0.1, momentum=0.0)


@pytest.mark.parametrize(
    ("method", "privacy", "memory"),
    [
        *((FEDDM, {"mechanism": name}, {"images": START}) for name in ("residual", "gradient")),
        (FEDAVG, {}, {}),
    ],
)
def test_updates_are_divided_by_nominal_size(method: Method, privacy: Any, memory: Any) -> None:
    """Compares an exact client with a private one at 4 times its size."""
    data = digits(np.arange(60) % 10)
    settings = PrivacySettings(noise_multiplier=1e-12, clip=1e6, sample_rate=1.0, **privacy)
    results = []
    for ctx in (round_context(None, nominal=240.0), round_context(settings, nominal=240.0)):
        clients: Group = ExactClientView([0], data, [torch.arange(60)])
        if ctx.privacy is not None:
            clients = private_clients(method, ctx, data)
        weights = ctx.architecture.state_dict()
        message = method.broadcast(method.initial_state(weights), ctx)
        ((upload, _),) = method.client_step(message, clients, [memory], ctx)
        arrays = dict(upload.arrays())
        start = memory or {f"parameters.{name}": value for name, value in weights.items()}
        results.append(torch.cat([(arrays[name] - start[name]).flatten() for name in start]))
    exact, private = results
    torch.testing.assert_close(private, exact * 60 / 240, atol=1e-5, rtol=1e-3)


def private_run(method: str = "feddm", **privacy: Any) -> Any:
    """Returns the settings of a run with empty clients, and 200 records."""
    training = {"local_epochs": 1, "batch": 100}
    method_settings = {"feddm": {"iterations": 2, "ipc": 1, "server_epochs": 1, "batch": 3}}
    sections = {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"kind": "dirichlet-plain", "clients": 4, "alpha": 0.01, "seed": 9},
        "model": {"width": 4},
        "method": method_settings.get(method, training),
        "privacy": {"noise_multiplier": 3.0, **privacy},
    }
    return resolve(sections), digits(np.arange(200) % 10)


def test_executed_releases_match_charges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken versions would skip empty clients, miscount steps, derive q from len(train) or use one
    key for all clients of a run."""
    draws: list[tuple[int, Tensor]] = []
    original = SecretGenerator.normal

    def spy(self: SecretGenerator, *args: Any) -> Tensor:
        noise = original(self, *args)
        draws.append((id(self), noise.flatten() / noise.std()))
        return noise

    monkeypatch.setattr(SecretGenerator, "normal", spy)
    for method, steps, rate, privacy in (
        ("feddm", 2, 30 / 359.5, {}),
        ("feddm", 2 + 1, 1.0, {"mechanism": "features"}),  # two networks, and the counts
        ("fedavg", 4, 100 / 359.5, {}),
        ("fedfm", 4 + 2, 100 / 359.5, {}),  # and the anchors' sums and counts
    ):
        draws.clear()
        run_settings, data = private_run(method, **privacy)
        parts = partition(data.labels.numpy(), run_settings.resolved_partition, 10)
        assert min(map(len, parts)) == 0
        report: Any = simulate(run_settings, data=(data, data)).privacy
        assert len(draws) == 4 * 2 * steps
        assert rate in [pytest.approx(row["sample_rate"]) for row in report["ledger"]]
        assert len({key for key, _ in draws}) == 4
        wide = torch.stack([noise for _, noise in draws if len(noise) > 200][:32])
        correlations = torch.corrcoef(wide) - torch.eye(len(wide))
        assert correlations.abs().max() < 0.4  # of 260 numbers: 5 deviations are 0.31


def test_private_runs_write_only_public_values(tmp_path: Path) -> None:
    """A broken version would log clean losses, counts or timings."""
    run_settings, data = private_run()
    result = simulate(run_settings, data=(data, data), output=tmp_path)
    assert result.folder is not None
    rows = read_rows(result.folder)
    assert {key for row in rows for key in row} == {
        "round", "test_accuracy", "epsilon", "upload_floats", "upload_bytes", "client_upload_bytes",
        *MEASURES,
    }  # fmt: skip
    # equal, also for empty clients
    assert {tuple(row["client_upload_bytes"]) for row in rows} == {(10 * (64 * 4 + 8),) * 4}
    summary = json.loads((result.folder / "summary.json").read_text())
    assert set(summary) == {
        "method", "dataset", "rounds", "test_accuracy", "upload_bytes", "upload_floats_per_round", "device", "seed",
        "differential_privacy", "folder", "settings", *MEASURES, "confusion_matrix",
    }  # fmt: skip
    kinds = (".json", ".jsonl", ".md", ".toml")
    files = [p for p in result.folder.rglob("*") if p.suffix in kinds]
    outside = [p for p in files if "simulation_only" not in p.parts]
    assert len(outside) == 10
    start = json.loads((result.folder / "privacy_start.json").read_text())
    assert set(start) == {
        *("schema_version", "noise_multiplier", "data_set", "test_images", "ledgers"),
        *("simulated", "warnings", "run"),  # known before the data are read
    }
    # the true number of records, as a number and not inside a hash or a fraction
    count = re.compile(r"(?<![\w.])200(?![\w.])")
    assert not any(count.search(p.read_text().replace(str(tmp_path), "")) for p in outside)


def test_numbers_of_requests_are_checked() -> None:
    arrays = [("a", torch.full((9,), 2.0)), ("b", torch.full((16,), 2.0)), ("n", torch.tensor([7]))]
    check_numbers(arrays, 10.0)  # sqrt(36 + 64)
    with pytest.raises(RequestRefusedError, match="got 10"):
        check_numbers(arrays, 9.99)
    with pytest.raises(RequestRefusedError, match=r"got 4\.808e\+38"):  # no overflow
        check_numbers([("a", torch.full((2,), 3.4e38))], 1e38)
    for value in (float("nan"), float("inf")):
        with pytest.raises(RequestRefusedError, match=r"parameters\.w .*not finite"):
            check_numbers([("parameters.w", torch.tensor([1.0, value]))], None)
    with pytest.raises(RequestRefusedError, match=r"weight .*not finite"):
        check_numbers(ModelParameters({}, float("nan")).numbers(), None)


def test_first_phase_requests_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    first_request = FedAF.first_request

    def hostile(self: FedAF, state: Any, context: Any) -> Any:
        request: Any = first_request(self, state, context)
        next(tensor for _, tensor in request.arrays()).fill_(float("inf"))
        return request

    monkeypatch.setattr(FedAF, "first_request", hostile)
    monkeypatch.setattr(FedAF, "first_step", None)  # no client answers
    method = {"knowledge_from": "first-phase"}
    sections = {"run": {"method": "fedaf", "rounds": 1}, "privacy": {"noise_multiplier": 3.0}}
    with pytest.raises(RequestRefusedError, match="not finite"):
        simulate(resolve({**sections, "method": method}))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("epsilon", {"epsilon": "8"}),
        ("max_request_norm", {"noise_multiplier": 1.0, "max_request_norm": 0.0}),
        ("noise_multiplier", {"noise_multiplier": -1.0}),
        ("clip", {"epsilon": 1.0, "clip": float("inf")}),
        ("sample_rate", {"epsilon": 1.0, "sample_rate": 0.0}),
        ("unit", {"epsilon": 1.0, "unit": "household"}),
        ("unit", {"epsilon": 1.0, "unit": "user"}),  # the number of users is missing
        ("mechanism", {"epsilon": 1.0, "mechanism": "paper"}),  # no guarantee, so no ε
        ("ledger", {"epsilon": 1.0, "ledger": "a\0b"}),
        ("ledger", {"epsilon": 1.0, "ledger": "\ud800"}),
        ("ledger", {"epsilon": 1.0, "ledger": "~nobody-of-that-name/ledgers"}),
        ("epsilon", {"epsilon": True}),
        ("noise_multiplier", {}),  # or a budget
    ],
)
def test_invalid_privacy_settings_are_named(key: str, values: dict[str, Any]) -> None:
    with pytest.raises(PrivacySettingError) as caught:
        PrivacySettings(**values)
    assert (caught.value.section, caught.value.key) == ("privacy", key)
    assert "\n" not in str(caught.value)


def test_ledger_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert PrivacySettings(epsilon=1.0, ledger="kept").ledger_folder == tmp_path / "kept"
    assert PrivacySettings(epsilon=1.0, ledger=NO_LEDGER).ledger_folder is None
