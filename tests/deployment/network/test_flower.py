"""A federation over Flower on this machine, from end to end: what `fedsynth server` and `fedsynth
client` do is what one process does.

The tests share one federation and stand in an order: ledgers are spent, and clients killed, on the
way, and the last one looks at what is left.
"""

from __future__ import annotations

import ipaddress
import json
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
from tests.deployment.network.conftest import (
    BOUNDED,
    CLIENTS,
    Federation,
    Run,
    eventually,
    report_of,
)
from tests.deployment.place import sections

pytestmark = pytest.mark.network
PRIVATE = {"noise_multiplier": 5.0}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A run's rows of metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_model(folder: Path, given: Any) -> None:
    """The run's model is that of the same run in one process."""
    together = simulate(resolve(given))
    found = load_file(folder / "model.safetensors")
    for name, value in together.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_a_private_run_charges_each_owners_ledger_as_a_simulation(federation: Federation) -> None:
    """And each owner has a report of its own, the server one of what it was sent."""
    given = sections("feddm", privacy=PRIVATE)
    folder = federation.run(given).ended()
    alone = simulate(resolve(given))
    rows = rows_of(folder)
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[-1]["epsilon"] == pytest.approx(alone.metrics[-1]["epsilon"], rel=1e-12)
    assert "seconds" not in rows[-1]
    assert not (folder / "simulation_only").exists()
    assert verify_run(folder).problems == []
    together = report_of(folder)
    assert together["verdict"]["formal"]
    assert set(together["ledger_heads"]) == {f"client-{k:03d}" for k in range(CLIENTS)}
    for number in range(CLIENTS):
        [own] = federation.home(number).glob("runs/*/privacy_report.json")
        report = report_of(own.parent)
        assert set(report["ledger_heads"]) == {f"client-{number:03d}"}
        assert report["guarantee"]["epsilon"] == pytest.approx(rows[-1]["epsilon"], rel=1e-12)
        assert verify_run(own.parent).problems == []
        assert "asks client" in federation.log(number)
        assert "privacy: ε = " in federation.log(number)


def test_open_runs_end_with_the_model_of_one_process(federation: Federation) -> None:
    runs: dict[str, tuple[Any, Run]] = {}
    for method in ("feddm", "fedaf", "fedstats"):
        given = sections(method)
        if method == "fedstats":  # of which the server sees sums alone
            given["method"] |= {"second_moments": "no", "aggregation": "secure"}
        runs[method] = (given, federation.run(given))
    for given, run in runs.values():
        folder = run.ended()
        assert not any("lost" in row for row in rows_of(folder))
        same_model(folder, given)


def test_a_server_resumes_from_its_checkpoint(federation: Federation) -> None:
    """Its process is killed inside a round; clients keep what they had, and the model is that of a
    run which nobody has stopped. SCAFFOLD's clients have memories.

    One client is held up, so that the server waits: one that dies while it sends costs SuperNodes
    three minutes, until the SuperLink gives up its message.
    """
    given = sections("scaffold", run={"rounds": 3})
    run = federation.run(given)
    eventually(lambda: run.rows() >= 1, "a first round")
    held_up = federation.clients[1]
    held_up.send_signal(signal.SIGSTOP)
    try:
        eventually(
            lambda: federation.rounds(0) == federation.rounds(BOUNDED) == run.rows() + 1,
            "others' answers",
        )
        os.kill(eventually(federation.server_process, "the ServerApp's process"), signal.SIGKILL)
    finally:
        held_up.send_signal(signal.SIGCONT)
    folder = eventually(run.under_way, "the run's folder")
    assert 1 <= run.rows() < 3
    again = federation.run(given, resume=folder)
    ended = again.ended()
    assert [row["round"] for row in rows_of(ended)] == [1, 2, 3]
    same_model(ended, given)


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("strangers", "does not know the key of this client"),
        ("keys", "with this key is connected"),
    ],
)
def test_a_stranger_and_a_second_client_with_a_key_are_refused(
    federation: Federation, folder: str, why: str
) -> None:
    """A stranger's request is refused before its body is read; the second client of a key, while
    the first one is connected."""
    key = federation.folder / folder / "client-000"
    home = federation.folder / f"second-{folder}"
    done = subprocess.run(
        [*federation.client_arguments(0, key, home), "--wait", "1"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot connect to 127.0.0.1" in done.stderr
    assert why in done.stderr
    assert not list(home.glob("*.jsonl"))


def test_a_node_killed_in_a_sum_drops_out_and_the_others_continue(
    federation: Federation,
) -> None:
    """One client is held up while another is killed: the sum of that round, and all later ones, are
    those of who is there. (Of three, one may look: so that another may be lost, each adds all.)"""
    given = sections("fedstats", run={"rounds": 4})
    given["method"] |= {"aggregation": "secure", "honest": 1, "second_moments": "no"}
    run = federation.run(given, answer=20.0)
    eventually(lambda: run.rows() >= 1, "a first round")
    held_up = federation.clients[1]
    held_up.send_signal(signal.SIGSTOP)
    try:
        federation.kill_client(BOUNDED)
    finally:
        held_up.send_signal(signal.SIGCONT)
    rows = rows_of(run.ended(240.0))
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert "lost" not in rows[0]
    assert set(rows[-1]["lost"]) == {str(BOUNDED)}
    assert not any("not_counted" in row for row in rows)
    assert [bool(sent) for sent in rows[-1]["client_upload_bytes"]] == [True, True, False]


def test_the_last_one_nothing_left_the_machine_and_no_process_is_left(
    federation: Federation,
) -> None:
    federation.close()
    found = federation.watched()
    processes = {pid for pid, kind, _ in found if kind == "process"}
    started = " ".join(what for _, kind, what in found if kind == "process")
    for name in ("'superlink'", "'supernode'", "flower-superexec", "flwr-serverapp"):
        assert name in started, name
    assert "flwr-clientapp" not in started  # no code of a server's ran at an owner's
    seen = [(kind, literal_eval(what)) for _, kind, what in found if kind != "process"]
    assert seen
    for kind, where in seen:
        assert is_here(where[0] if isinstance(where, tuple) else where), (kind, where)
    eventually(lambda: not [pid for pid in processes if _lives(pid)], "the processes' end", 20)


def is_here(host: Any) -> bool:
    """Whether a name, an address or a socket's file is this machine's; None: any of its own."""
    name = host.decode() if isinstance(host, bytes) else host
    if name is None or name == "localhost" or name.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _lives(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return state != "Z" and any(one in command for one in (b"flwr", b"flower", b"fedsynth"))
    return False
