"""Tests of a federation over Flower on this machine: `fedsynth server` and `fedsynth client` give
the results of a simulation.

The tests share one federation and depend on their order: they spend ledgers and kill clients, and
the last one checks the remaining files and processes.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
from ast import literal_eval
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsynth import resolve, simulate
from fedsynth.results.verification import verify_run
from tests.deployment.local_setup import PRIVATE, sections
from tests.deployment.network.conftest import (
    CLIENTS,
    POLICY_CLIENT,
    Federation,
    Run,
    report_of,
    wait_for,
)
from tests.quick_runs import read_rows

pytestmark = pytest.mark.network


def same_model(folder: Path, settings: Any) -> None:
    """Compares the run's model with that of a simulation."""
    simulation = simulate(resolve(settings))
    tensors = load_file(folder / "model.safetensors")
    expected = dict(simulation.model.state_dict())
    torch.testing.assert_close(tensors, expected, rtol=1e-5, atol=1e-5)


def test_private_runs_charge_each_ledger_as_simulations(federation: Federation) -> None:
    """Each owner and the server write a privacy report."""
    settings = sections("feddm", privacy=PRIVATE)
    folder = federation.run(settings).finished_folder()
    simulation = simulate(resolve(settings))
    rows = read_rows(folder)
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[-1]["epsilon"] == pytest.approx(simulation.metrics[-1]["epsilon"], rel=1e-12)
    assert "seconds" not in rows[-1]
    assert not (folder / "simulation_only").exists()
    assert verify_run(folder).problems == []
    report = report_of(folder)
    assert report["verdict"]["formal"]
    assert set(report["ledger_heads"]) == {f"client-{k:03d}" for k in range(CLIENTS)}
    for number in range(CLIENTS):
        [report_file] = federation.home(number).glob("runs/*/privacy_report.json")
        owner_report = report_of(report_file.parent)
        assert set(owner_report["ledger_heads"]) == {f"client-{number:03d}"}
        assert owner_report["guarantee"]["epsilon"] == pytest.approx(rows[-1]["epsilon"], rel=1e-12)
        assert verify_run(report_file.parent).problems == []
        assert "asks client" in federation.log(number)
        assert "privacy: ε = " in federation.log(number)


def test_open_runs_match_the_model_of_a_simulation(federation: Federation) -> None:
    runs: dict[str, tuple[Any, Run]] = {}
    for method in ("feddm", "fedaf", "fedstats"):
        settings = sections(method)
        if method == "fedstats":  # the server sees only sums
            settings["method"] |= {"second_moments": "no", "aggregation": "secure"}
        runs[method] = (settings, federation.run(settings))
    for settings, run in runs.values():
        folder = run.finished_folder()
        assert not any("lost" in row for row in read_rows(folder))
        same_model(folder, settings)


def test_server_resumes_from_its_checkpoint(federation: Federation) -> None:
    """The server is killed inside a round; the model equals that of an uninterrupted run.
    SCAFFOLD's clients have memories.

    One client is paused so that the server waits: if the server died while it sends, SuperNodes
    would wait three minutes until the SuperLink drops its message.
    """
    settings = sections("scaffold", run={"rounds": 3})
    run = federation.run(settings)
    wait_for(lambda: run.rows() >= 1, "a first round")
    paused = federation.clients[1]
    paused.send_signal(signal.SIGSTOP)
    try:
        wait_for(
            lambda: federation.rounds(0) == federation.rounds(POLICY_CLIENT) == run.rows() + 1,
            "others' answers",
        )
        os.kill(wait_for(federation.server_process, "the ServerApp's process"), signal.SIGKILL)
    finally:
        paused.send_signal(signal.SIGCONT)
    folder = wait_for(run.unfinished_folder, "the run's folder")
    assert 1 <= run.rows() < 3
    resumed_run = federation.run(settings, resume=folder)
    finished = resumed_run.finished_folder()
    assert [row["round"] for row in read_rows(finished)] == [1, 2, 3]
    same_model(finished, settings)


UNKNOWN, DUPLICATE = "does not know the key of this client", "with this key is connected"


@pytest.mark.parametrize(("folder", "reason"), [("strangers", UNKNOWN), ("keys", DUPLICATE)])
def test_unknown_and_duplicate_keys_are_refused(
    federation: Federation, folder: str, reason: str
) -> None:
    """The second client of a key is refused while the first one is connected."""
    key = federation.folder / folder / "client-000"
    home = federation.folder / f"second-{folder}"
    process = subprocess.run(
        [*federation.client_arguments(0, key, home), "--wait", "1"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert process.returncode == 2, process.stdout + process.stderr
    assert "cannot connect to 127.0.0.1" in process.stderr
    assert reason in process.stderr
    assert not list(home.glob("*.jsonl"))


def test_secure_sums_continue_without_a_killed_node(federation: Federation) -> None:
    """One client is paused while another is killed: this round's sum and all later ones contain the
    remaining clients. (One of the three may collude and one may be lost: each adds all the
    noise.)"""
    settings = sections("fedstats", run={"rounds": 4})
    settings["method"] |= {"aggregation": "secure", "honest": 1, "second_moments": "no"}
    run = federation.run(settings, answer=20.0)
    wait_for(lambda: run.rows() >= 1, "a first round")
    paused = federation.clients[1]
    paused.send_signal(signal.SIGSTOP)
    try:
        federation.kill_client(POLICY_CLIENT)
    finally:
        paused.send_signal(signal.SIGCONT)
    rows = read_rows(run.finished_folder(240.0))
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert "lost" not in rows[0]
    assert set(rows[-1]["lost"]) == {str(POLICY_CLIENT)}
    assert not any("not_counted" in row for row in rows)
    assert [bool(sent) for sent in rows[-1]["client_upload_bytes"]] == [True, True, False]


def test_federation_contacts_no_other_machine_and_leaves_no_process(
    federation: Federation,
) -> None:
    federation.close()
    entries = federation.log_entries()
    processes = {pid for pid, kind, _ in entries if kind == "process"}
    started = " ".join(value for _, kind, value in entries if kind == "process")
    for name in ("'superlink'", "'supernode'", "flower-superexec", "flwr-serverapp"):
        assert name in started, name
    assert "flwr-clientapp" not in started  # no server code ran at an owner
    contacts = [(kind, literal_eval(value)) for _, kind, value in entries if kind != "process"]
    assert contacts
    for kind, address in contacts:
        assert is_local(address[0] if isinstance(address, tuple) else address), (kind, address)
    wait_for(lambda: not [pid for pid in processes if is_running(pid)], "the processes' end", 20)


def is_local(host: Any) -> bool:
    """Returns True for a name, address or socket file of this machine; None is any of its
    addresses."""
    name = host.decode() if isinstance(host, bytes) else host
    if name is None or name == "localhost" or name.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_running(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return state != "Z" and any(name in command for name in (b"flwr", b"flower", b"fedsynth"))
    return False
