"""Tests that a simulation on several ranks gives the results of one process, and reports faults."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fedsynth import FedAvg, rank, resolve
from fedsynth.cli.app import app
from fedsynth.core.messages import Message
from fedsynth.errors import SettingError
from fedsynth.experiments.runner import run_sweep
from fedsynth.experiments.selection import select_privately
from fedsynth.federation import ranks, run_data
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import public_context
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.links import EMPTY, SECONDS, Frame
from fedsynth.federation.protocol import Observer, RunTerms
from fedsynth.federation.ranks import owners
from fedsynth.privacy import read_ledger
from fedsynth.privacy.ledger import Ledger
from fedsynth.rank import num_ranks, this_rank
from fedsynth.results.verification import verify_run
from fedsynth.simulation import simulate as simulate_module
from fedsynth.simulation.simulate import synthesize
from tests.simulation import rank_program
from tests.simulation.test_recorded_numbers import case, settings_of
from tests.test_cuda import run_on_fake_gpu, small

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="not tried there")
ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "tests.simulation.rank_program")
TRAIN = ("-m", "fedsynth", "train", "--method", "fedavg", "--model", "linear")
LIMIT = 300.0  # seconds for all ranks, also on a busy machine


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def started(
    ranks: int, *arguments: str, size: int = 0, port: int = 0, **more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a program at several ranks, as torchrun does, and kills what is left of it."""
    world = {"WORLD_SIZE": str(size or ranks), "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(port or free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SECONDS: "120", **world, **more}
    processes = []
    try:
        for number in range(ranks):
            variables = {**environment, "RANK": str(number), "LOCAL_RANK": str(number)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=variables,
                    cwd=ROOT,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Waits for all ranks, and returns the exit code, stdout and stderr of each."""
    results = []
    for process in processes:
        out, err = process.communicate(timeout=LIMIT)
        results.append((process.returncode, out, err))
    return results


def values(folder: Path, name: str, rank: int = 0) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one process, which also leaves an interrupted run to two ranks."""
    folder = tmp_path_factory.mktemp("alone")
    rank_program.main("equal,encoded,interrupted,rejected", folder)
    rank_program.main("resumed", folder / "whole")
    return folder


@pytest.fixture(scope="module")
def two(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    (alone / "interrupted").rename(folder / "interrupted")
    names = "equal,encoded,resumed,interrupted,private,rejected,failing,links,alive,hanging"
    with started(2, *PROGRAM, names, str(folder)) as both:
        ((code, _, err),) = ended(both[:1])  # the other one hangs in the end
        assert code == 0, err
    return folder


@pytest.mark.parametrize("name", rank_program.EQUAL)
def test_two_ranks_give_equal_results(name: str, alone: Path, two: Path) -> None:
    assert values(two, "equal")[name] == values(alone, "equal")[name]


def test_ranks_encode_images_together(alone: Path, two: Path) -> None:
    expected = values(alone, "encoded")
    whole = expected["batches"][0]
    assert expected["batches"] == [whole, whole, 0]
    shares = [values(two, "encoded", rank)["batches"] for rank in range(2)]
    assert [sum(counts) for counts in zip(*shares, strict=True)] == [whole, whole, 0]
    assert abs(shares[0][0] - shares[1][0]) <= 2
    assert values(two, "encoded")["facts"] == expected["facts"]


def test_an_invalid_upload_is_rejected_with_its_own_reason(alone: Path, two: Path) -> None:
    expected = values(alone, "rejected")
    assert values(two, "rejected") == expected
    for row in expected["rows"]:
        assert len(set(row["rejected"].values())) == 5


@pytest.mark.parametrize("name", rank_program.CLOSE)
def test_only_last_bits_depend_on_who_shares_a_pass(name: str, alone: Path, two: Path) -> None:
    expected = torch.tensor(values(alone, "equal")[name])
    torch.testing.assert_close(
        torch.tensor(values(two, "equal")[name]), expected, rtol=0, atol=1e-6
    )


@pytest.mark.slow
def test_four_ranks_give_equal_results(alone: Path, tmp_path: Path) -> None:
    with started(4, *PROGRAM, "equal", str(tmp_path)) as processes:
        assert [code for code, _, _ in ended(processes)] == [0] * 4
    for name in rank_program.EQUAL:
        assert values(tmp_path, "equal")[name] == values(alone, "equal")[name]


def test_runs_resume_with_another_number_of_ranks(alone: Path, two: Path) -> None:
    whole = values(alone / "whole", "resumed")
    assert values(two, "resumed") == whole
    rank_program.main("resumed", two)
    assert values(two, "resumed") == whole


def test_each_client_is_charged_once_and_no_noise_repeats(two: Path, tmp_path: Path) -> None:
    released = values(two, "private")
    assert len(set(released["uploads"])) == 4
    rank_program.main("private", tmp_path)
    for client in range(4):
        name = f"client-{client:03d}.jsonl"
        charged = read_ledger(two / "private" / "ledgers" / name).releases
        assert charged == read_ledger(tmp_path / "private" / "ledgers" / name).releases
    assert not verify_run(Path(released["folder"])).problems
    assert values(two, "private", rank=1)["metrics"] == released["metrics"]


@pytest.mark.slow
def test_equal_keys_at_two_ranks_are_detected(tmp_path: Path) -> None:
    with started(2, *PROGRAM, "private", str(tmp_path), EQUAL_KEYS="1") as both:
        ended(both)
    assert len(set(values(tmp_path, "private")["uploads"])) < 4


def test_rank_0_reports_the_failures_of_other_ranks(two: Path) -> None:
    errors = values(two, "failing")
    assert errors["client"][0] == "training.diverged"
    assert re.fullmatch(
        r"rank 1, one of the clients \[[0-3]\]: the loss is not finite", errors["client"][1]
    )
    assert errors["version"][0] == errors["settings"][0] == "ranks.differ"
    assert "rank 1 has fedsynth '0.0.1', but rank 0 has '0.0.2'" in errors["version"][1]
    assert "rank 1 has run.seed 1, but rank 0 has 0" in errors["settings"][1]
    assert errors["diverged"][0] == "training.diverged"
    assert "the encoder failed" in errors["encoder"][1]
    assert not {"nothing", "nothing more"} & errors.keys()
    others = values(two, "failing", rank=1)
    assert others.keys() == errors.keys()
    assert others["version"][0] == "ranks.stopped"


def test_no_frame_is_lost_if_runs_or_messages_overlap(two: Path) -> None:
    assert values(two, "links")["sums"] == [number * 2**24 for number in range(4)]


def test_a_long_step_of_rank_0_is_no_fault(two: Path) -> None:
    assert values(two, "alive", rank=1) == {"frames": ["step", "end"], "total": 3}
    assert values(two, "alive") == {"total": 3}


def test_a_hanging_rank_is_noticed(two: Path) -> None:
    code, text = values(two, "hanging")["error"]
    assert code == "ranks.silent"
    assert "rank 1 has given no sign for 5 seconds" in text


def errors_of(err: str) -> list[str]:
    return [line for line in err.splitlines() if "error" in line.lower()]


def wait_for_round_2(server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        if line.startswith("round 2/"):
            return


def test_a_killed_rank_ends_the_run_with_one_line(tmp_path: Path) -> None:
    many = ("--rounds", "100000", "--output", str(tmp_path))
    with started(2, *TRAIN, *many) as both:
        wait_for_round_2(both[0])
        both[1].send_signal(signal.SIGKILL)
        code, out, err = ended(both)[0]
    assert (code, out) == (2, "")
    (line,) = errors_of(err)
    assert line.startswith("fedsynth: error: rank 1 has ended unexpectedly")
    assert "To resume: fedsynth train --resume" in err


@pytest.mark.slow
def test_a_killed_server_is_reported_by_one_rank(tmp_path: Path) -> None:
    many = ("--rounds", "100000", "--output", str(tmp_path))
    with started(2, *TRAIN, *many) as both:
        wait_for_round_2(both[0])
        both[0].send_signal(signal.SIGKILL)
        _, (code, out, err) = ended(both)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("fedsynth: error: rank 0 has ended unexpectedly")


@pytest.mark.slow
def test_a_server_that_stops_is_noticed(tmp_path: Path) -> None:
    many = ("--rounds", "100000", "--output", str(tmp_path))
    with started(2, *TRAIN, *many, **{SECONDS: "15"}) as both:
        wait_for_round_2(both[0])
        both[0].send_signal(signal.SIGSTOP)
        ((code, out, err),) = ended(both[1:])
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("fedsynth: error: rank 0 has given no sign for 15 seconds")


def test_a_missing_rank_and_a_port_that_is_taken_are_reported() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        with (
            started(1, *TRAIN, size=2, port=taken) as busy,
            started(1, *TRAIN, size=2, **{SECONDS: "3"}) as lonely,
        ):
            results = ended(busy) + ended(lonely)
    for code, out, err in results:
        assert (code, out) == (2, "")
        (line,) = errors_of(err)
        assert line.startswith("fedsynth: error: rank 0 cannot connect all 2 ranks")
    assert "EADDRINUSE" in results[0][2]


@pytest.mark.parametrize(("number", "size"), [("2", "2"), ("0", "0")])
def test_a_rank_that_does_not_exist_is_reported(number: str, size: str) -> None:
    stale = {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": number, "MASTER_PORT": "1"}
    run = subprocess.run(
        [sys.executable, *TRAIN],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", **stale},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    expected = f"RANK is {number}, but must be below WORLD_SIZE, which is {size}. Start with"
    assert line.startswith(f"fedsynth: error: the environment variable {expected}")


def test_torchrun_starts_a_run(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = [*launcher, *TRAIN, "--rounds", "2", "--output", str(tmp_path)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert run.stdout.count("run folder:") == 1
    assert [line[:10] for line in run.stderr.splitlines() if "accuracy" in line] == [
        "round 1/2 ", "round 2/2 ",
    ]  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 1


def test_other_commands_run_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        app(["runs"])
    assert "runs was started with torchrun" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        app(["train", "--no-such-option"])
    assert capsys.readouterr().err == ""  # rank 0 prints it


def test_functions_that_charge_or_start_runs_need_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank, "num_ranks", lambda: 2)
    sweep: Any = SimpleNamespace(output=tmp_path, selection=None)
    for function in (run_sweep, select_privately):
        with pytest.raises(SettingError, match="WORLD_SIZE must be 1 for a"):
            function(sweep, print)
    assert not list(tmp_path.iterdir())


def test_only_rank_0_exports_a_shared_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_of(case("fedstats", run={"rounds": 1}, method={"ipc": 4}))
    monkeypatch.setattr(rank, "this_rank", lambda: 1)
    synthesize(settings, tmp_path / "share", runs=tmp_path / "runs", unprotected=True)
    assert not (tmp_path / "share").exists()


def test_each_group_of_clients_is_a_sign_of_progress() -> None:
    steps = []

    class Steps(Observer):
        def step(self, round: int, stage: str, completed: int, total: int) -> None:
            steps.append((stage, completed, total))

    settings = settings_of(case("fedstats", run={"rounds": 1, "memory_gb": 1e-6}))
    simulate_module.simulate(settings, observer=Steps())
    exchange = [("clients", finished, 4) for finished in range(1, 5)]
    assert [step for step in steps if step[0] == "clients"] == 2 * exchange


def received(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a frame as its receiver has them."""
    return {k: bytes(v) if isinstance(v, bytearray) else v for k, v in parts.items()}


class Loopback:
    """Links to a second rank in the same process."""

    rank, size, peers = 0, 2, range(1, 2)

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.steps = 0

    def run(self) -> Any:
        return nullcontext()

    def send_all(self, kind: str, facts: Any, parts: Any = EMPTY) -> None:
        if kind == "start":
            rows = [
                replace(client, ledger=client.ledger and Ledger(client.ledger.client))
                for client in self.clients
            ]
            self.other = InProcess(rows)
            self.other.start(RunTerms(facts["sizes"], facts["noise_multiplier"]))
            self.frames.append(Frame(1, 1, "hello", self.stated, {}))

    def send(self, peer: int, kind: str, facts: Any, parts: Any = EMPTY) -> None:
        frame = Frame(peer, 1, kind, json.loads(json.dumps(facts)), received(parts))
        if kind == "step":
            self.steps += 1
            ranks._answer(self.other, cast(Any, self), frame)
        else:
            self.frames.append(replace(frame, peer=1))

    def poll(self) -> Frame | None:
        return self.frames.pop(0) if self.frames else None

    def next(self, waiting: Sequence[int]) -> Frame:
        return self.frames.pop(0)


@pytest.mark.parametrize("name", ["scaffold", "fedaf", "fedstats, private"])
def test_tensors_move_between_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    links = Loopback()
    original = ranks.Ranks.__init__

    def keep(self: ranks.Ranks, clients: Any, *rest: Any) -> None:
        links.clients, links.stated = clients, rest[1]
        original(self, clients, *rest)

    sections = small(name.split(",")[0], ", private" in name)
    expected, _ = run_on_fake_gpu(sections, monkeypatch)
    monkeypatch.setattr(ranks.Ranks, "__init__", keep)
    monkeypatch.setattr(simulate_module, "connect", lambda: links)
    actual, _ = run_on_fake_gpu(sections, monkeypatch)
    assert links.steps
    assert expected["model"] == actual["model"]


@dataclass(frozen=True)
class Mixed(Message):
    """A message with all kinds of fields."""

    parameters: Mapping[str, Tensor]
    mask: Tensor
    known: Tensor | None
    weight: float


def test_messages_of_many_clients_are_packed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(k: int, size: int = 3, weight: float = 1.5) -> Mixed:
        parameters = {"a.b": torch.full((size, 2), float(k)).T, "count": torch.tensor(k)}
        return Mixed(
            parameters, torch.arange(size) == k, torch.zeros(0, 2) if k % 2 else None, weight
        )

    sent: dict[int, Any] = {0: mixed(0), 2: mixed(2), 1: mixed(1), 3: mixed(3, size=4), 5: mixed(5)}
    expected = {k: message.to_bytes() for k, message in sent.items()}
    sparse = replace(mixed(6), mask=torch.ones(3).to_sparse())
    sent |= {4: replace(mixed(4), weight=cast(Any, "1")), 6: sparse, 7: Message()}
    untyped: Any = {"a.b": 1.0}
    sent[8] = replace(mixed(8), parameters=untyped)
    sent[9] = replace(mixed(9), mask=None)  # which only the receiver notices
    sent[11] = replace(mixed(11), weight=math.nan)  # which the server rejects
    for limit, stacks in ((2**25, 3), (1, 6)):
        monkeypatch.setattr(ranks, "STACK_BYTES", limit)
        rejected: dict[int, str] = {}
        facts, parts = ranks.stacked(Mixed, "uploads", remaining := dict(sent), rejected)
        assert (len(facts), remaining, list(rejected)) == (stacks + 1, {}, [4, 6, 7, 8])
        assert "weight must be a number" in rejected[4]
        assert "mask must be a dense tensor" in rejected[6]
        assert "the message must have the type Mixed, got Message" in rejected[7]
        frame = Frame(1, 1, "answer", {"uploads": json.loads(json.dumps(facts))}, parts)
        assert all(part.is_contiguous() for part in parts.values())  # as gloo needs
        received = ranks.unstacked(Mixed, "uploads", frame, torch.device("cpu"), rejected)
        assert "Mixed.mask must have the type Tensor, got NoneType" in rejected[9]
        assert math.isnan(received.pop(11).weight)
        assert {k: message.to_bytes() for k, message in received.items()} == expected
        for _, tensor in received[0].arrays():  # a tensor of its own, not a view of the stack
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_channels_last_tensors_are_sent_contiguously() -> None:
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sent = {k: ranks.NamedTensors({"x": images + k}) for k in range(2)}
    _, parts = ranks.stacked(ranks.NamedTensors, "states", dict(sent), {})
    (stack,) = parts.values()
    assert stack.is_contiguous()
    assert torch.equal(stack, torch.stack([images, images + 1]))


def test_results_of_an_earlier_call_are_discarded() -> None:
    """A server loop may stop before it has read all results of the other ranks."""

    class Doubling(Loopback):
        def send(self, peer: int, kind: str, facts: Any, parts: Any = EMPTY) -> None:
            frame = Frame(peer, 1, kind, facts, received(parts))
            backend: Any = SimpleNamespace(clients=[client])
            answers = Answers(self.frames)
            ranks._answer_parts(backend, cast(Any, answers), frame)

        def next(self, waiting: Sequence[int]) -> Frame:
            return self.frames.pop(0)

    class Answers:
        def __init__(self, frames: list[Frame]) -> None:
            self.frames = frames

        def send(self, peer: int, kind: str, facts: Any, parts: Any = EMPTY) -> None:
            self.frames.append(Frame(1, 1, kind, facts, dict(parts)))

    def server_part(shared: Any, context: Any) -> Any:
        return lambda part: {"x": 2 * part["x"]}

    loaded = run_data.data_of_run(resolve(small("fedavg")), None, None, print, download=False)
    spec = loaded.train.spec
    context = public_context(loaded.settings, spec, torch.device("cpu"))
    method = SimpleNamespace(server_part=server_part)
    client: Any = SimpleNamespace(context=context, method=method, settings=loaded.settings)
    backend = ranks.Ranks([client], cast(Any, Doubling()), "")
    results = backend.compute_parts({}, context, [{"x": torch.tensor(k)} for k in range(4)])
    assert int(next(results)["x"]) == 0
    later = backend.compute_parts({}, context, [{"x": torch.tensor(k)} for k in range(10, 14)])
    assert [int(result["x"]) for result in later] == [20, 22, 24, 26]


def test_clients_are_shared_out_by_cost() -> None:
    sizes = {0: 100, 1: 30, 2: 40, 3: 20, 4: 0}
    context: Any = None
    assert owners(FedAvg(batch=10), sizes, context, 2) == {0: 0, 2: 1, 1: 1, 3: 1, 4: 1}
    steps = owners(FedAvg(local_steps=5, local_epochs=1), sizes, context, 2)
    assert sorted(steps.values()) == [0, 0, 0, 1, 1]


def test_a_cost_that_varies_between_rounds_moves_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has only its own clients' records, so a client must stay at its rank."""

    def cost(self: FedAvg, examples: int, context: Any) -> float:
        return examples if context.round == 1 else 1 / examples

    monkeypatch.setattr(FedAvg, "client_cost", cost)
    loaded = run_data.data_of_run(resolve(small("fedavg")), None, None, print, download=False)
    _, clients = simulate_module.among_clients(loaded)
    settings = loaded.settings
    context = public_context(settings, loaded.train.spec, torch.device("cpu"))
    runtimes = []
    for number, part in enumerate(clients.parts):
        data = ClientData(loaded.train, torch.from_numpy(part), torch.zeros(0, dtype=torch.int64))
        runtimes.append(ClientRuntime(number, settings, context, data))
    backend = ranks.Ranks(runtimes, cast(Any, Loopback()), "")
    numbers = list(range(len(runtimes)))
    shares = [backend._shares(replace(context, round=n), numbers) for n in (1, 2)]
    assert shares[0] == shares[1]
    sizes = {k: len(runtimes[k].data.records) for k in numbers}
    later = owners(settings.method, sizes, replace(context, round=2), 2)
    assert [[k for k in numbers if later[k] == rank] for rank in (0, 1)] != shares[0]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_variables_of_another_program_are_no_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    assert (num_ranks(), this_rank()) == (2, 1)
    monkeypatch.setenv(name, "gold")
    assert (num_ranks(), this_rank()) == (1, 0)
