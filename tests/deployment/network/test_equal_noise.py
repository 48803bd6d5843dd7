"""With noise that can be repeated, a private run over Flower is that of one process: FedDM, whose
uploads its server sees, and FedStats, of which it sees sums alone."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsynth import simulate
from fedsynth.privacy import randomness
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.report.pages import report_sentences
from tests.deployment.network.conftest import (
    CLIENTS,
    HERE,
    Federation,
    report_of,
    sections,
    settings_of,
)
from tests.simulation.test_unchanged import RepeatableNoise

pytestmark = pytest.mark.network
PRIVATE = {"noise_multiplier": 5.0}


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("flwr is not installed: pip install 'fedsynth[flower]'")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("repeating")
    made = Federation(folder, script=HERE / "repeating_client.py")
    yield made
    made.close()


@pytest.fixture
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the nodes' clients draw, in this process."""
    made = itertools.count()

    def fresh() -> RepeatableNoise:
        return RepeatableNoise(next(made) % CLIENTS)

    monkeypatch.setattr(randomness, "_fresh_generator", fresh)


def same_model(folder: Path, given: Any) -> Any:
    """The run's model is that of one process: to 1e-5 of a tensor's largest number."""
    together = simulate(settings_of(given), quiet=True)
    found = load_file(folder / "model.safetensors")
    for name, value in together.model.state_dict().items():
        atol = 1e-5 * max(1.0, float(value.abs().max()))
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)
    return together


def ledger(repeating: Federation, number: int) -> tuple[Any, ...]:
    """What stands in a data owner's ledger; nothing before its first run."""
    file = repeating.home(number) / f"client-{number:03d}.jsonl"
    return read_ledger(file).releases if file.is_file() else ()


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize(
    ("method", "settings"), [("feddm", {}), ("fedstats", {"aggregation": "secure"})]
)
def test_a_private_run_is_that_of_one_process(
    repeating: Federation, method: str, settings: dict[str, Any]
) -> None:
    run = {"quorum": 1.0} if settings else {}  # the noise is that of two, and one may look
    given = sections(method, run=run, method=settings, privacy=PRIVATE)
    before = [len(ledger(repeating, number)) for number in range(CLIENTS)]
    folder = repeating.run(given).ended()
    together = same_model(folder, given)
    for number in range(CLIENTS):
        spent = epsilon(ledger(repeating, number)[before[number] :], 1e-5)
        assert spent == pytest.approx(together.metrics[-1]["epsilon"], rel=1e-12)
        files = repeating.home(number).glob("runs/*/privacy_report.json")
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        assert report_of(newest.parent)["test_only_randomness"]
    if settings:
        assert (
            report_sentences(report_of(folder))
            .secure_aggregation()
            .startswith("aggregation executed")
        )
