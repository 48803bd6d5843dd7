"""Tests of the guard in front of other frameworks' jobs, without these frameworks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.errors import BudgetExceededError, LedgerError, PrivacyError, PrivacySettingError
from fedsynth.privacy import Ledger, PrivacySettings, UpdateGuard, guard, mechanisms, read_ledger
from fedsynth.privacy.ledger.ledger import encode
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.report.build import write_report
from fedsynth.results.verification import verify_run
from tests.privacy.support import plan
from tests.raising import raises

CLIP, WIDTH = 0.5, 20_000
TOML = f"clip = {CLIP}\nepsilon = 8\ndelta = 1e-5\n"


def make(folder: Path, more: str = "rounds = 3", client: str = "clinic") -> UpdateGuard:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guard.toml").write_text(TOML + more)
    return UpdateGuard(folder, client)


def rows(folder: Path, client: str = "clinic") -> int:
    return len(read_ledger(folder / f"{client}.jsonl").releases)


def model(value: float, width: int = WIDTH) -> dict[str, Any]:
    half = width // 2
    return {"a": np.full((2, half // 2), value, np.float32), "b": torch.full((half,), float(value))}


def update_of(folder: Path, number: int, value: float = 1.0) -> np.ndarray:
    """Returns what the server learns of a client whose weights have risen from 0 to `value`."""
    answer = UpdateGuard(folder, "clinic").protect([number], model(0), model(value))
    return np.concatenate([answer["a"].ravel(), answer["b"].numpy()])


# ---------------------------------------------------------------- the claim, and broken versions


def faults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Returns the promises that the guard breaks."""
    broken = set()
    sigma = make(folder).settings.sigma
    noise = update_of(folder, 0, value=0.0)
    if not 0.97 < noise.std() / (sigma * CLIP) < 1.03:  # 0.5 % is one standard deviation
        broken.add("noise")
    if abs(update_of(folder, 1, value=1e3).mean()) > 0.05:  # the whole update has norm CLIP
        broken.add("clip")
    order: list[str] = []
    with monkeypatch.context() as patch:
        for owner, name in ((Ledger, "charge"), (SecretGenerator, "normal")):
            patch.setattr(owner, name, noted(order, name, getattr(owner, name)))
        update_of(folder, 2)
    if order[:2] != ["charge", "normal"]:
        broken.add("order")
    try:
        update_of(folder, 3)
    except BudgetExceededError:
        pass
    else:
        broken.add("budget")
    return broken


def noted(order: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **values: Any) -> Any:
        order.append(name)
        return call(*args, **values)

    return wrapped


def half_noise(patch: pytest.MonkeyPatch) -> None:
    normal = SecretGenerator.normal
    patch.setattr(SecretGenerator, "normal", lambda *args: normal(*args) / 2)


def no_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mechanisms, "clip_factors", lambda squares, clip: torch.ones_like(squares))


def charge_after_noise(patch: pytest.MonkeyPatch) -> None:
    def late(update: Any, plan: Any, sigma: float, enforcer: BudgetEnforcer, secret: Any) -> Any:
        noisy = mechanisms.clip_rows(update[None], plan.clip)[0]
        noisy = noisy + secret.normal((len(update),), sigma * plan.clip)
        enforcer.charge(plan.release(len(enforcer.ledger.releases) + 1, sigma))
        return noisy.to(torch.float32)

    patch.setattr(guard, "noisy_update", late)


def no_refusal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BudgetEnforcer, "check_budget", lambda *args: None)


@pytest.mark.parametrize(
    ("breaks", "promise"),
    [
        (half_noise, "noise"),
        (no_clip, "clip"),
        (charge_after_noise, "order"),
        (no_refusal, "budget"),
    ],
)
def test_broken_versions_are_found(
    breaks: Callable[[pytest.MonkeyPatch], None],
    promise: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert faults(tmp_path / "whole", monkeypatch) == set()
    breaks(monkeypatch)
    assert faults(tmp_path / "broken", monkeypatch) == {promise}


def test_update_is_clipped_as_a_whole(tmp_path: Path, without_noise: None) -> None:
    make(tmp_path, "noise_multiplier = 3")
    assert np.linalg.norm(update_of(tmp_path, 0, value=7.0)) == pytest.approx(CLIP, rel=1e-5)
    assert np.allclose(update_of(tmp_path, 1, value=1e-4), 1e-4)  # below the clip


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_update_that_is_not_finite_contributes_zero(
    value: float, tmp_path: Path, without_noise: None, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, "noise_multiplier = 3")
    assert not update_of(tmp_path, 0, value=value).any()
    assert "client clinic has a NaN or an infinity" in caplog.text
    assert rows(tmp_path) == 1


def test_left_out_patterns_without_an_array_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clinic = make(tmp_path, 'noise_multiplier = 3\nleft_out = ["bn.*", "*.runing_var"]')
    arrays = {"w": np.zeros(2), "bn.running_var": np.ones(2)}
    clinic.protect([0], arrays, arrays)
    assert "'*.runing_var'" in caplog.text
    assert "'bn.*'" not in caplog.text


def test_counts_and_left_out_arrays_are_those_received(tmp_path: Path, without_noise: None) -> None:
    clinic = make(tmp_path, 'noise_multiplier = 3\nleft_out = ["*.running_var"]')
    received = {
        "w": np.zeros(2),
        "bn.num_batches_tracked": np.array(3),
        "averaged.num_batches_tracked": np.array(3.5),
        "bn.running_var": torch.ones(2, dtype=torch.float16),
        "none": np.zeros((0, 2)),
    }
    trained = {name: value + 0.1 for name, value in received.items()}
    trained |= {name: np.array(7) for name in trained if "num_batches" in name}
    answer = clinic.protect([0], received, trained)
    assert answer["w"] == pytest.approx(0.1)
    assert answer["bn.num_batches_tracked"] == 3
    assert answer["averaged.num_batches_tracked"] == 3.5
    assert answer["bn.running_var"].tolist() == [1, 1]
    assert {n: (type(v), v.dtype, v.shape) for n, v in answer.items()} == {
        n: (type(v), v.dtype, v.shape) for n, v in received.items()
    }
    assert read_ledger(tmp_path / "clinic.jsonl").releases[0].dimension == 2
    difference = clinic.protect([1], received, trained, difference=True)
    assert difference["w"] == pytest.approx(0.1)
    assert not difference["bn.num_batches_tracked"].any()
    assert not difference["bn.running_var"].any()
    public = {"bn.num_batches_tracked": np.array(9)}
    assert clinic.protect([2], public, public)["bn.num_batches_tracked"] == 9
    assert rows(tmp_path) == 2  # nothing private, no charge


@pytest.mark.parametrize(
    "answer",
    [{}, {"w": np.zeros(3)}, {"w": np.zeros(2), "v": np.zeros(2)}, {"w": np.array(["secret", ""])}],
)
def test_other_arrays_are_refused_before_the_charge(answer: dict[str, Any], tmp_path: Path) -> None:
    clinic = make(tmp_path)
    with raises(PrivacyError, "guard.arrays"):
        clinic.protect([0], {"w": np.zeros(2)}, answer)
    with raises(PrivacyError, "guard.arrays"):
        clinic.protect([0], {"w": np.array([1, 2])}, {"w": np.zeros(2)})
    assert rows(tmp_path) == 0


@pytest.mark.parametrize("kind", [np.int64, np.bool_, np.float16, np.float64])
def test_types_of_an_answer_do_not_decide_what_is_released(kind: Any, tmp_path: Path) -> None:
    """Else a job could state one bit with each array, without noise or a charge."""
    received = {"w": np.zeros(4, np.float32), "v": np.zeros(4, np.float32)}
    trained = {"w": np.zeros(4, kind), "v": np.zeros(4, kind)}
    answer = make(tmp_path).protect([0], received, trained)
    assert all(array.all() for array in answer.values())  # each has noise
    assert [row.dimension for row in read_ledger(tmp_path / "clinic.jsonl").releases] == [8]


@pytest.mark.parametrize(
    ("value", "received", "norm"),
    [(1e300, 0.0, 0.0), (1.7e308, -1.7e308, 0.0), (5e-324, 0.0, 0.0), (6e4, -6e4, CLIP)],
)
def test_extreme_updates_keep_the_clip(
    value: float, received: float, norm: float, tmp_path: Path, without_noise: None
) -> None:
    clinic = make(tmp_path, "noise_multiplier = 3")
    base, trained = {"w": np.full(3, received)}, {"w": np.full(3, value)}
    released = clinic.protect([0], base, trained)["w"] - base["w"]
    assert np.linalg.norm(released) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_arrays_of_low_precision_are_released(
    kind: torch.dtype, tmp_path: Path, without_noise: None
) -> None:
    """An answer that fails after its charge would cost budget for nothing."""
    received = {"w": torch.zeros(4, dtype=kind)}
    answer = make(tmp_path).protect([0], received, {"w": torch.full((4,), 100.0).to(kind)})
    assert answer["w"].dtype == kind
    assert answer["w"].double().tolist() == [CLIP / 2] * 4


def test_nominal_values_are_those_declared(tmp_path: Path) -> None:
    clinic = make(tmp_path, "rounds = 3\nnominal = {num-examples = 500, loss = 0.5}")
    assert list(map(repr, clinic.nominal.values())) == ["500", "0.5"]
    with pytest.raises(PrivacyError, match=r"nominal\.loss is invalid"):
        make(tmp_path, "rounds = 3\nnominal = {loss = nan}")


# --------------------------------------------------------------- retries, crashes, concurrency


def test_repeated_request_is_charged_once(tmp_path: Path) -> None:
    make(tmp_path)
    first, again = update_of(tmp_path, 0), update_of(tmp_path, 0, value=2.0)  # trained anew
    assert (first == again).all()
    assert rows(tmp_path) == 1
    assert (update_of(tmp_path, 1) != first).any()
    clinic = UpdateGuard(tmp_path, "clinic")
    clinic.protect([1], model(0), model(1))
    assert rows(tmp_path) == 2
    clinic.protect([1], model(0.5), model(1))  # other weights: another request
    assert rows(tmp_path) == 3


def test_a_damaged_answer_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    update_of(tmp_path, 1)
    answer = tmp_path / "clinic.safetensors"
    answer.write_bytes(answer.read_bytes()[:20])
    with raises(LedgerError, "guard.answer") as caught:
        update_of(tmp_path, 1)
    assert str(answer) in str(caught.value)
    assert rows(tmp_path) == 1


def test_a_deleted_ledger_is_detected(tmp_path: Path) -> None:
    make(tmp_path)
    update_of(tmp_path, 0)
    (tmp_path / "clinic.jsonl").unlink()
    with raises(LedgerError, "ledger.missing"):
        UpdateGuard(tmp_path, "clinic")


def test_crash_after_the_charge_lets_nothing_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(guard, "write_whole", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            update_of(tmp_path, 0)
    assert rows(tmp_path) == 1
    assert not (tmp_path / "clinic.safetensors").exists()
    answer = update_of(tmp_path, 0)
    assert rows(tmp_path) == 2
    with monkeypatch.context() as patch:  # after the answer is on the disk
        patch.setattr(guard, "write_report", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            update_of(tmp_path, 1)
    update_of(tmp_path, 1)
    assert rows(tmp_path) == 3
    assert (update_of(tmp_path, 1) != answer).any()


def test_threads_share_one_budget(tmp_path: Path) -> None:
    make(tmp_path)

    def release(number: int) -> bool:
        try:
            update_of(tmp_path, number)
        except BudgetExceededError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(release, range(6))) == 3
        assert rows(tmp_path) == 3


def test_processes_answer_a_request_with_one_noise(tmp_path: Path) -> None:
    make(tmp_path)
    program = (
        "import sys, torch; from fedsynth.privacy import UpdateGuard\n"
        "guard = UpdateGuard(sys.argv[1], 'clinic')\n"
        "print(guard.protect(['round'], {'w': torch.zeros(2)}, {'w': torch.ones(2)})['w'].tolist())"
    )
    calls = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    assert len({call.communicate()[0] for call in calls}) == 1
    assert rows(tmp_path) == 1


# ------------------------------------------------------------------------- settings and report


@pytest.mark.parametrize(
    "text",
    [
        "clip = 1",
        TOML,
        TOML + "rounds = 1\nnoise_multiplier = 1",
        TOML + "rounds = 0",
        TOML + "rounds = 1\nnoise = 2",
        TOML + 'rounds = 1\nadjacency = "add-remove"',
        TOML.replace("8", "nan") + "rounds = 1",
        TOML + "noise_multiplier = 0",
    ],
)
def test_wrong_settings_are_refused(text: str, tmp_path: Path) -> None:
    with raises(PrivacyError, "files.guard.toml"):
        UpdateGuard(tmp_path, "clinic")
    (tmp_path / "guard.toml").write_text(text)
    with raises(PrivacyError, "files.guard.toml"):
        UpdateGuard(tmp_path, "clinic")
    assert not list(tmp_path.glob("*.jsonl"))


def test_replacing_all_data_needs_twice_the_noise(tmp_path: Path) -> None:
    single = make(tmp_path / "a").settings.sigma
    double = make(tmp_path / "b", 'rounds = 3\nadjacency = "replace-one"').settings.sigma
    assert double == pytest.approx(2 * single, rel=2e-3)


def test_units_are_not_mixed(tmp_path: Path) -> None:
    enforcer = BudgetEnforcer(Ledger("clinic", tmp_path / "clinic.jsonl", dataset=guard.DATASET))
    enforcer.charge(plan().release(1, 1.0))
    with raises(LedgerError, "ledger.unit"):
        make(tmp_path)
    with raises(PrivacySettingError, "privacy.unit"):
        PrivacySettings(epsilon=1, unit="client")


def released(folder: Path, client: str = "clinic") -> Path:
    make(folder, "rounds = 3\nnominal = {num-examples = 500}", client)
    for number in range(2):
        UpdateGuard(folder, client).protect([number], model(0, 8), model(1, 8))
    return folder


def test_report_states_the_client_level_first(tmp_path: Path) -> None:
    report = (released(tmp_path) / "privacy_report.md").read_text()
    summary = report.split("## What was computed")[0]
    assert "one client with all its data (client level)" in summary
    assert "training" not in summary or "not seen" in summary
    assert "not seen" in summary
    assert "ONE CLIENT" in report
    assert "EXAMPLE" not in report
    facts = json.loads((tmp_path / "privacy_report.json").read_text())
    assert facts["guarantee"]["epsilon"] < 8
    assert {entry["unit"] for entry in facts["ledger"]} == {"client"}
    two = next(group for group in facts["guarantee"]["groups"] if group["units"] == 2)
    assert (
        two["epsilon"] < 2 * facts["guarantee"]["epsilon"]
    )  # √2 times μ, as releases are separate
    replaced = tmp_path / "replaced"
    make(replaced, 'rounds = 1\nadjacency = "replace-one"')
    update_of(replaced, 0)
    assert "twice the clip" in (replaced / "privacy_report.md").read_text()


def test_report_of_the_guard_is_verified(tmp_path: Path) -> None:
    released(tmp_path, "a")
    released(tmp_path, "b")
    result = CliRunner().invoke(app, ["privacy", "verify", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "compared with the ledger files" in result.output
    shown = CliRunner().invoke(app, ["privacy", "report", str(tmp_path)])
    assert "ONE CLIENT" in shown.output


def edit(file: str, old: str, new: str, count: int = 1) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert re.search(old, text)
        (folder / file).write_text(re.sub(old, new, text, count=count))

    return change


def other_delta(folder: Path) -> None:
    """Rewrites the settings and all of the report for a larger δ, which gives a smaller ε."""
    edit("guard.toml", "1e-5", "1e-2")(folder)
    write_report(guard.guard_report(folder), folder)


def test_changed_settings_are_noted_with_the_next_update(tmp_path: Path) -> None:
    """Each update notes the settings with which it was charged."""
    first = (released(tmp_path) / "guard.toml").read_text()
    make(tmp_path, "rounds = 4")
    assert verify_run(tmp_path).problems[0].code == "files.guard.toml"
    update_of(tmp_path, 7)
    changed = verify_run(tmp_path)
    assert changed.problems == []
    assert "2 successive versions of guard.toml" in " ".join(changed.notes)
    (tmp_path / "guard.toml").write_text(first)
    assert "files.guard.toml" in [problem.code for problem in verify_run(tmp_path).problems]


def cut_row(folder: Path) -> None:
    ledger = folder / "clinic.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-2]))


def forge_row(folder: Path) -> None:
    """Rewrites a row with more noise, and all chain hashes."""
    ledger, chain, lines = folder / "clinic.jsonl", "", b""
    for line in ledger.read_text().splitlines():
        entry = json.loads(line)
        entry.pop("chain")
        if "noise_multiplier" in entry:
            entry["noise_multiplier"] = 9.0
        encoded, chain = encode(entry, chain)
        lines += encoded
    ledger.write_bytes(lines)


@pytest.mark.parametrize(
    ("tamper", "code"),
    [
        (edit("privacy_report.json", r'"epsilon": [\d.]+', '"epsilon": 0.5'), "guarantee.epsilon"),
        (edit("privacy_report.json", '"delta": 1e-05', '"delta": 0.01'), "delta"),
        (edit("privacy_report.json", '"sensitivity": 0.5', '"sensitivity": 5.0'), "sensitivity"),
        (edit("privacy_report.md", "client level", "record level"), "privacy_report.md"),
        (edit("guard.toml", "epsilon = 8", "epsilon = 80"), "files.guard.toml"),
        (edit("guard.toml", "num-examples = 500", "num-examples = 312"), "files.guard.toml"),
        (edit("clinic.jsonl", '"dimension": 8', '"dimension": 9'), "ledger.file"),
        (other_delta, "files.guard.toml"),
        (cut_row, "ledger.rows"),
        (forge_row, "ledger.chain"),
        (lambda folder: (folder / "clinic.jsonl").unlink(), "ledger.clients"),
    ],
)
def test_tampering_is_found(tamper: Callable[[Path], None], code: str, tmp_path: Path) -> None:
    assert verify_run(released(tmp_path)).problems == []
    tamper(tmp_path)
    found = [problem.code for problem in verify_run(tmp_path).problems]
    assert any(code in each for each in found), found
    assert CliRunner().invoke(app, ["privacy", "verify", str(tmp_path)]).exit_code == 1
