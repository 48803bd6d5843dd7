"""Tests of the guards' parts for Flower and NVFlare, with these frameworks and, for their logic,
with stand-ins of the few names that the parts import."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsynth.errors import BudgetExceededError, MessageError
from fedsynth.privacy import read_ledger
from fedsynth.results.verification import verify_run
from tests.raising import raises

FLOWER, NVFLARE = "fedsynth.deployment.flower.guard", "fedsynth.deployment.nvflare_filter"
EXAMPLES = Path(__file__).parents[2] / "examples"
TOML = """
clip = 1.0
epsilon = 8
delta = 1e-5
rounds = 2
[nominal]
num-examples = 500
num_examples = 500
loss = 1
NUM_STEPS_CURRENT_ROUND = 10
"""
NOMINAL = {"num-examples": 500, "num_examples": 500, "loss": 1, "NUM_STEPS_CURRENT_ROUND": 10}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "guard.toml").write_text(TOML)
    return tmp_path


def rows(folder: Path, client: str) -> int:
    return len(read_ledger(folder / f"{client}.jsonl").releases)


def installed(package: str) -> None:
    reason = f"{package} is not installed: pip install 'fedsynth[flower,nvflare]'"
    pytest.importorskip(package, reason=reason)


def stand_in(patch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Replaces a framework by modules with the given names."""
    for path, names in modules.items():
        for end in range(1, path.count(".") + 2):
            parent = ".".join(path.split(".")[:end])
            if parent not in modules or parent == path:
                module = ModuleType(parent)
                vars(module).update(modules.get(parent, {}))
                module.__path__ = []
                patch.setitem(sys.modules, parent, module)
        assert names


def load(patch: pytest.MonkeyPatch, name: str) -> Any:
    patch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    del sys.modules[name]
    return module


# ------------------------------------------------------------------------------------ Flower


class Record(dict[str, Any]):
    pass


class ArrayRecord(Record):
    pass


class MetricRecord(Record):
    pass


class ConfigRecord(Record):
    pass


class RecordDict(dict[str, Any]):
    def of(self, kind: type[Record]) -> dict[str, Any]:
        return {name: record for name, record in self.items() if isinstance(record, kind)}

    @property
    def array_records(self) -> dict[str, Any]:
        return self.of(ArrayRecord)

    @property
    def config_records(self) -> dict[str, Any]:
        return self.of(ConfigRecord)


class Array:
    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def numpy(self) -> np.ndarray:
        return self.values


class FlowerMessage:
    def __init__(
        self, content: Any, *, reply_to: Any = None, message_type: str = "train", **_: Any
    ) -> None:
        self.content = content
        self.error = content
        self.metadata = SimpleNamespace(run_id=1, group_id="", message_type=message_type)

    def has_error(self) -> bool:
        return isinstance(self.content, SimpleNamespace)


class Hostile:
    """An answer that raises an error of the guard when it is read."""

    @property
    def content(self) -> Any:
        raise BudgetExceededError("patient Smith", ("Smith", 1.0, 2.0))


class FlowerApp:
    def train(self) -> Callable[[Any], None]:
        return lambda job: setattr(self, "job", job)

    def lifespan(self) -> Callable[[Any], None]:
        return lambda around: setattr(self, "around", contextmanager(around))

    def __call__(self, message: Any, context: Any) -> Any:
        with getattr(self, "around", nullcontext)(context):
            return self.job(message, context)


@pytest.fixture(params=["stand-in", "installed"])
def flower(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "installed":
        installed("flwr")
        from flwr.supercore.task_identity import TaskIdentity

        for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 1)):
            monkeypatch.setattr(TaskIdentity, name, value)
    else:
        kinds = (ArrayRecord, MetricRecord, ConfigRecord, RecordDict, Array)
        app = {kind.__name__: kind for kind in kinds}
        app |= {"Message": FlowerMessage, "Context": object}

        def error(code: int, reason: str) -> SimpleNamespace:
            return SimpleNamespace(code=code, reason=reason)

        codes = SimpleNamespace(UNKNOWN=0, CLIENT_APP_RAISED_EXCEPTION=2)
        modules = {"flwr.app": app, "flwr.app.error": {"Error": error}}
        modules["flwr.clientapp"] = {"ClientApp": FlowerApp}
        stand_in(monkeypatch, {**modules, "flwr.common.constant": {"ErrorCode": codes}})
    module = load(monkeypatch, FLOWER)
    module.app = sys.modules["flwr.app"]
    return module


def weights(module: Any, value: float) -> Any:
    return module.ArrayRecord({"w": module.Array(np.full(4, value, np.float32))})


def request(module: Any, number: int, kind: str = "train") -> Any:
    config = module.ConfigRecord({"server-round": number})
    content = module.RecordDict({"arrays": weights(module, 0.0), "config": config})
    return module.Message(content=content, dst_node_id=1, message_type=kind)


def run(module: Any, job: Callable[..., Any], message: Any, **config: Any) -> Any:
    app = module.GuardedClientApp()
    app.train()(job)
    return app(message, SimpleNamespace(node_config=config))


def ask(module: Any, folder: Path, job: Callable[..., Any], number: int = 1) -> Any:
    config = {"guard": str(folder), "partition-id": 3}
    return run(module, job, request(module, number), **config)


def answering(module: Any, **records: Any) -> Callable[[Any, Any], Any]:
    def job(message: Any, context: Any) -> Any:
        return module.Message(content=module.RecordDict(records), reply_to=message)

    return job


def test_flower_answers_are_written_anew(flower: Any, folder: Path) -> None:
    metrics = flower.MetricRecord({"train_loss": 0.125, "num-examples": 312})
    texts = flower.ConfigRecord({"patient": "Smith"})
    job = answering(flower, arrays=weights(flower, 1e6), metrics=metrics, notes=texts)
    answer = ask(flower, folder, job)
    assert dict(answer.content["metrics"]) == NOMINAL
    assert set(answer.content) == {"arrays", "metrics"}
    array = answer.content["arrays"]["w"].numpy()
    assert array.dtype == np.float32
    assert np.abs(array).max() < 20  # clipped to 1, with noise of about 0.85
    again = ask(flower, folder, job).content["arrays"]["w"].numpy()
    assert (again == array).all()
    assert rows(folder, "client-003") == 1
    ask(flower, folder, job, number=2)
    refused = ask(flower, folder, job, number=3)
    assert refused.has_error()
    assert "above the cap 8" in refused.error.reason
    assert "\n" not in refused.error.reason
    assert rows(folder, "client-003") == 2
    assert verify_run(folder).problems == []


def test_flower_job_may_change_what_it_received(flower: Any, folder: Path) -> None:
    """Else its change would be taken for public, and pass the clip."""

    def job(message: Any, context: Any) -> Any:
        array = flower.Array(np.full(4, 1e6, np.float32))
        message.content["arrays"]["w"] = array
        records = flower.RecordDict({"arrays": message.content["arrays"]})
        return flower.Message(content=records, reply_to=message)

    assert np.abs(ask(flower, folder, job).content["arrays"]["w"].numpy()).max() < 20


def test_flower_evaluations_are_nominal_and_free(flower: Any, folder: Path) -> None:
    for metrics in ({}, {"num-examples": 312}, {"patient": 7.0}):
        record = flower.MetricRecord(metrics)
        for records in ({"metrics": record}, {"Smith": record}, {"b": record, "a": record}, {}):
            answer = ask(flower, folder, answering(flower, **records)).content
            assert {name: dict(record) for name, record in answer.items()} == {"metrics": NOMINAL}
    assert rows(folder, "client-003") == 0


@pytest.mark.parametrize("kind", ["fit", "evaluate"])
def test_flower_older_answers_have_their_records(flower: Any, folder: Path, kind: str) -> None:
    content = {f"{kind}ins.parameters": weights(flower, 0.0), f"{kind}ins.config": {}}
    content[f"{kind}ins.config"] = flower.ConfigRecord({})
    asked = flower.Message(flower.RecordDict(content), dst_node_id=1, message_type="train")
    arrays = {f"{kind}res.parameters": weights(flower, 1e6)} if kind == "fit" else {}
    status = flower.ConfigRecord({"code": 3, "message": "Smith"})
    job = answering(flower, **arrays, **{f"{kind}res.status": status, "Smith": status})
    answer = dict(run(flower, job, asked, guard=str(folder)).content)
    if arrays:
        assert np.abs(answer.pop("fitres.parameters")["w"].numpy()).max() < 20
    else:
        assert dict(answer.pop("evaluateres.loss")) == NOMINAL
    assert {name: dict(record) for name, record in answer.items()} == {
        f"{kind}res.num_examples": NOMINAL,
        f"{kind}res.metrics": NOMINAL,
        f"{kind}res.status": {"code": 0, "message": ""},
    }


def test_flower_answers_have_the_metadata_of_the_request(flower: Any, folder: Path) -> None:
    def job(message: Any, context: Any) -> Any:
        message.metadata.group_id = "Smith"
        message.metadata.message_type = "train.Smith"
        return flower.Message(content=flower.RecordDict(), reply_to=message)

    asked = request(flower, 1)
    replied: list[Any] = []
    kind = flower.Message

    def reply(*parts: Any, reply_to: Any, **content: Any) -> Any:
        replied.append(reply_to.metadata)
        return kind(*parts, reply_to=reply_to, **content)

    flower.Message = reply
    run(flower, lambda _, context: job(asked, context), asked, guard=str(folder))
    assert asked.metadata.group_id == "Smith"
    assert (replied[-1].group_id, replied[-1].message_type) == ("", "train")


def test_flower_errors_state_no_private_values(flower: Any, folder: Path) -> None:
    def failing(error: BaseException) -> Callable[[Any, Any], Any]:
        def job(message: Any, context: Any) -> Any:
            raise error

        return job

    named = flower.ArrayRecord({"Smith": flower.Array(np.zeros(4, np.float32))})
    jobs = [
        failing(ValueError("patient Smith")),
        failing(MessageError("patient Smith")),
        failing(BudgetExceededError("patient Smith", ("Smith", 1.0, 2.0))),
        failing(SystemExit("patient Smith")),
        lambda message, _: flower.Message(flower.Error(0, "patient Smith"), reply_to=message),
        lambda message, _: Hostile(),
        answering(flower, a=weights(flower, 1.0), b=weights(flower, 2.0)),
        answering(flower, arrays=named),
        lambda message, context: None,
    ]
    errors = [ask(flower, folder, job).error for job in jobs]
    assert {(error.code, error.reason) for error in errors} == {(0, flower.FAILED)}
    assert rows(folder, "client-003") == 0


@pytest.mark.parametrize("late", [False, True])
def test_flower_lifespan_errors_state_no_private_values(
    flower: Any, folder: Path, late: bool
) -> None:
    """Regression: Flower runs the lifespan outside all mods, and sends its errors."""

    def lifespan(context: Any) -> Iterator[None]:
        if late:
            yield
        raise RuntimeError("patient Smith")
        yield

    app = flower.GuardedClientApp()
    app.lifespan()(lifespan)
    app.train()(answering(flower, arrays=weights(flower, 1.0)))
    answer = app(request(flower, 1), SimpleNamespace(node_config={"guard": str(folder)}))
    assert answer.error.reason == flower.FAILED
    assert rows(folder, "client-000") == 0


def test_flower_older_answers_need_their_numbers(
    flower: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the server refused answers without them, which were charged."""
    (tmp_path / "guard.toml").write_text(TOML.partition("[nominal]")[0])
    content = {"fitins.parameters": weights(flower, 0.0), "fitins.config": flower.ConfigRecord({})}
    asked = flower.Message(flower.RecordDict(content), dst_node_id=1, message_type="train")
    job = answering(flower, **{"fitres.parameters": weights(flower, 1.0)})
    assert run(flower, job, asked, guard=str(tmp_path)).error.reason == flower.FAILED
    assert rows(tmp_path, "client-000") == 0
    assert "num-examples" not in caplog.text
    with (tmp_path / "guard.toml").open("a") as settings:
        settings.write("[nominal]\nnum-examples = 7\n")
    answer = run(flower, job, asked, guard=str(tmp_path)).content
    assert answer["fitres.num_examples"]["num_examples"] == 7
    content = {f"evaluateins.{name.partition('.')[2]}": value for name, value in content.items()}
    asked = flower.Message(flower.RecordDict(content), dst_node_id=1, message_type="train")
    assert run(flower, answering(flower), asked, guard=str(tmp_path)).error.reason == flower.FAILED
    assert "guard.toml has no nominal loss" in caplog.text


def test_flower_answers_without_their_number_are_noted(
    flower: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "guard.toml").write_text(TOML.partition("[nominal]")[0])
    answer = ask(flower, tmp_path, answering(flower, arrays=weights(flower, 1.0)))
    assert dict(answer.content["metrics"]) == {}
    assert "no nominal num-examples" in caplog.text


def test_flower_node_names_its_guard(
    flower: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSYNTH_GUARD", raising=False)
    with raises(MessageError, "guard.folder"):
        flower.guard_of({})
    monkeypatch.setenv("FEDSYNTH_GUARD", str(folder))
    assert flower.guard_of({}).client == "client-000"
    assert flower.guard_of({"client": "clinic"}).client == "clinic"


def test_flower_example_trains_behind_the_guard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("flwr")
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    script = runpy.run_path(str(EXAMPLES / "guarded_flower.py"))
    arrays = ArrayRecord(script["network"]().state_dict())
    message = Message(RecordDict({"arrays": arrays}), dst_node_id=1, message_type="train")
    config = {"guard": str(folder), "partition-id": 0}
    context = Context(1, 1, config, RecordDict(), {})
    answer = script["app"](message, context)
    assert dict(answer.content["metrics"]) == NOMINAL
    assert list(answer.content["arrays"]) == list(arrays)
    assert rows(folder, "client-000") == 1


# ----------------------------------------------------------------------------------- NVFlare


class Shareable(dict[str, Any]):
    def get_header(self, name: str, default: Any = None) -> Any:
        return self.setdefault("headers", {}).get(name, default)

    def set_header(self, name: str, value: Any) -> None:
        self.setdefault("headers", {})[name] = value

    def get_return_code(self, default: str = "OK") -> Any:
        return self.get_header("rc", default)

    def set_return_code(self, code: str) -> None:
        self.set_header("rc", code)


class Dxo:
    def __init__(self, data_kind: str, data: Any = None, meta: Any = None) -> None:
        self.data_kind, self.data, self.meta = data_kind, data or {}, meta or {}

    def to_shareable(self) -> Shareable:
        return Shareable(DXO=self)


def dxo_of(shareable: Shareable) -> Dxo:
    if "DXO" not in shareable:
        raise ValueError("no DXO")
    return shareable["DXO"]


def reply(code: str) -> Shareable:
    shareable = Shareable()
    shareable.set_return_code(code)
    return shareable


class Kind(StrEnum):
    WEIGHTS = "WEIGHTS"
    WEIGHT_DIFF = "WEIGHT_DIFF"
    METRICS = "METRICS"
    STATISTICS = "STATISTICS"


class Filter:
    def __init__(self, **_: Any) -> None:
        self.props: dict[str, Any] = {}

    def get_prop(self, name: str, default: Any = None) -> Any:
        return self.props.get(name, default)

    def set_prop(self, name: str, value: Any) -> None:
        self.props[name] = value

    def log_error(self, context: Any, text: str) -> None:
        print(text)


class TaskContext:
    """The properties of a task at one site."""

    def __init__(self) -> None:
        self.props: dict[str, Any] = {}
        self.sent_events: list[Any] = []
        self.events = SimpleNamespace(fire_and_forget_request=self.sent_events.append)
        self.sends_logs = False

    def get_prop(self, name: str, default: Any = None) -> Any:
        return self.props.get(name, default)

    def set_prop(self, name: str, value: Any, **_: Any) -> None:
        self.props[name] = value

    def get_engine(self) -> Any:
        return SimpleNamespace(get_widget=lambda _: self.events)

    def get_identity_name(self) -> str:
        return "site-1"

    def get_job_id(self) -> str:
        return "job"


@pytest.fixture(params=["stand-in", "installed"])
def nvflare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "installed":
        installed("nvflare")
    else:
        headers = SimpleNamespace(
            START_ROUND="start_round", CURRENT_ROUND="current_round", NUM_ROUNDS="num_rounds"
        )
        codes = SimpleNamespace(
            OK="OK", EXECUTION_EXCEPTION="EXECUTION_EXCEPTION", TASK_RESULT_FILTER_ERROR="REFUSED"
        )
        keys = SimpleNamespace(FILTER_DIRECTION="direction", TASK_NAME="task", SCOPE_OBJECT="s")
        meta = SimpleNamespace(INITIAL_METRICS="initial_metrics")
        constants = {
            "FilterKey": SimpleNamespace(IN="in", OUT="out"),
            "FLContextKey": keys,
            "ReturnCode": codes,
        }
        parts = {"DXO": Dxo, "DataKind": Kind, "MetaKey": meta, "from_shareable": dxo_of}
        stand_in(
            monkeypatch,
            {
                "nvflare.apis.dxo": parts,
                "nvflare.apis.dxo_filter": {"DXOFilter": Filter},
                "nvflare.apis.event_type": {
                    "EventType": SimpleNamespace(ABOUT_TO_START_RUN="about", START_RUN="start")
                },
                "nvflare.apis.filter": {
                    "FilterChainType": SimpleNamespace(TASK_DATA_CHAIN="data"),
                    "FilterContextKey": SimpleNamespace(CHAIN_TYPE="chain"),
                },
                "nvflare.apis.fl_constant": constants,
                "nvflare.apis.fl_context": {"FLContext": object},
                "nvflare.apis.shareable": {"Shareable": Shareable, "make_reply": reply},
                "nvflare.app_common.app_constant": {"AppConstants": headers},
                "nvflare.app_common.logging.constants": {"is_log_streaming_allowed": bool},
                "nvflare.widgets.widget": {"WidgetID": SimpleNamespace(FED_EVENT_RUNNER="events")},
            },
        )
    module = load(monkeypatch, NVFLARE)
    texts: list[str] = []
    monkeypatch.setattr(module.GuardFilter, "log_error", lambda self, _, text: texts.append(text))
    monkeypatch.setattr(module, "is_log_streaming_allowed", lambda context: context.sends_logs)
    module.texts = texts
    return module


def result_of(module: Any, folder: Path, result: Any, number: int = 0) -> Any:
    """Returns what leaves a site as the result of a task. The job overwrites what it received."""
    context = TaskContext()
    kinds = module.DataKind
    guard = module.GuardFilter(str(folder))
    guard.handle_event(module.EventType.ABOUT_TO_START_RUN, context)
    data = {"w": np.zeros(4, np.float32)}
    task = module.DXO(kinds.WEIGHTS, data).to_shareable()
    task.set_header(module.AppConstants.CURRENT_ROUND, number)
    context.set_prop(module.FLContextKey.TASK_NAME, "train")
    context.set_prop(module.FLContextKey.FILTER_DIRECTION, module.FilterKey.IN)
    assert guard.process(task, context) is task
    context.events.fire_and_forget_request("examples: 312")
    assert not context.sent_events  # events pass no filter
    data["w"] += 1e6
    context.set_prop(module.FLContextKey.FILTER_DIRECTION, module.FilterKey.OUT)
    return guard.process(result, context)


@pytest.mark.parametrize("kind", ["WEIGHTS", "WEIGHT_DIFF"])
def test_nvflare_results_are_written_anew(nvflare: Any, folder: Path, kind: str) -> None:
    def trained() -> Any:
        meta = {"NUM_STEPS_CURRENT_ROUND": 77, "initial_metrics": {"auc": 0.9}, "site": "Smith"}
        data = {"w": np.full(4, 1e6, np.float32)}
        result = nvflare.DXO(nvflare.DataKind[kind], data, meta).to_shareable()
        result.set_header("patient", "Smith")
        result["extra"] = "Smith"
        return result

    answer = result_of(nvflare, folder, trained())
    content = nvflare.from_shareable(answer)
    assert content.data_kind == nvflare.DataKind[kind]
    assert content.meta == {**NOMINAL, "initial_metrics": NOMINAL}
    assert np.abs(content.data["w"]).max() < 20
    assert answer.get_header(nvflare.AppConstants.CURRENT_ROUND) == 0
    assert "Smith" not in str(answer)
    again = nvflare.from_shareable(result_of(nvflare, folder, trained()))
    assert (again.data["w"] == content.data["w"]).all()
    assert rows(folder, "site-1") == 1
    result_of(nvflare, folder, trained(), number=1)
    refused = result_of(nvflare, folder, trained(), number=2)
    assert refused.get_return_code() == nvflare.ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "above the cap 8" in nvflare.texts[0]
    assert rows(folder, "site-1") == 2
    assert verify_run(folder).problems == []


def test_nvflare_metrics_and_errors_state_no_private_values(nvflare: Any, folder: Path) -> None:
    metrics = nvflare.DXO(nvflare.DataKind.METRICS, {"auc": 0.9, "num-examples": 312})
    answer = nvflare.from_shareable(result_of(nvflare, folder, metrics.to_shareable()))
    assert dict(answer.data) == NOMINAL
    for code in ("Smith", "EXECUTION_EXCEPTION", "TASK_ABORTED", "TIMEOUT"):
        failed = nvflare.make_reply(code)
        failed.set_header("patient", "Smith")
        answer = result_of(nvflare, folder, failed)
        assert answer.get_return_code() == nvflare.ReturnCode.EXECUTION_EXCEPTION
        assert "Smith" not in str(answer)
    assert rows(folder, "site-1") == 0


def test_nvflare_results_of_other_kinds_are_refused(nvflare: Any, folder: Path) -> None:
    other = nvflare.DXO(nvflare.DataKind.STATISTICS, {"count": 312}).to_shareable()
    for result in (other, nvflare.Shareable({"count": 312})):
        answer = result_of(nvflare, folder, result)
        assert answer.get_return_code() == nvflare.ReturnCode.TASK_RESULT_FILTER_ERROR
        assert "312" not in str(answer)
    assert len(nvflare.texts) == 2
    unseen = TaskContext()
    unseen.set_prop(nvflare.FLContextKey.FILTER_DIRECTION, nvflare.FilterKey.OUT)
    answer = nvflare.GuardFilter(str(folder)).process(other, unseen)
    assert answer.get_return_code() == nvflare.ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "task_data_filters" in nvflare.texts[-1]


def test_nvflare_sites_that_send_logs_get_no_task(nvflare: Any, folder: Path) -> None:
    context = TaskContext()
    context.sends_logs = True
    context.set_prop(nvflare.FLContextKey.FILTER_DIRECTION, nvflare.FilterKey.IN)
    with raises(MessageError, "guard.logs"):
        nvflare.GuardFilter(str(folder)).process(nvflare.Shareable(), context)


def test_nvflare_sites_that_send_events_get_no_task(nvflare: Any, folder: Path) -> None:
    """Regression: a job's events before its first task reached the server."""
    context = TaskContext()
    context.set_prop(nvflare.FLContextKey.FILTER_DIRECTION, nvflare.FilterKey.IN)
    guard = nvflare.GuardFilter(str(folder))
    guard.handle_event(nvflare.EventType.START_RUN, context)
    with raises(MessageError, "guard.events"):
        guard.process(nvflare.Shareable(), context)
    guard.handle_event(nvflare.EventType.ABOUT_TO_START_RUN, context)
    guard.process(nvflare.Shareable(), context)


@pytest.mark.parametrize("lacking", ["task_data_filters", "task_result_filters"])
def test_nvflare_sites_without_a_filter_get_no_task(
    nvflare: Any, folder: Path, lacking: str
) -> None:
    guard, context = nvflare.GuardFilter(str(folder)), TaskContext()
    guard.handle_event(nvflare.EventType.ABOUT_TO_START_RUN, context)
    context.set_prop(nvflare.FLContextKey.FILTER_DIRECTION, nvflare.FilterKey.IN)
    filters = {
        name: {nvflare.FilterKey.IN: [guard], nvflare.FilterKey.OUT: [guard]}
        for name in ("task_data_filters", "task_result_filters")
    }
    context.set_prop(nvflare.FLContextKey.SCOPE_OBJECT, SimpleNamespace(**filters))
    guard.process(nvflare.Shareable(), context)
    filters[lacking][nvflare.FilterKey.OUT].clear()
    with raises(MessageError, "guard.filters"):
        guard.process(nvflare.Shareable(), context)


def test_nvflare_tasks_for_other_sites_are_refused(nvflare: Any, folder: Path) -> None:
    """Regression: swarm learning sent a site's update to another site as a task."""
    context = TaskContext()
    context.set_prop(nvflare.FLContextKey.FILTER_DIRECTION, nvflare.FilterKey.OUT)
    guard = nvflare.GuardFilter(str(folder))
    key = nvflare.FilterContextKey.CHAIN_TYPE
    guard.set_prop(key, nvflare.FilterChainType.TASK_DATA_CHAIN)
    with raises(MessageError, "guard.peer"):
        guard.process(nvflare.Shareable(), context)


@pytest.mark.parametrize("sends_logs", [False, True])
def test_nvflare_policy_of_the_page_guards_a_site(folder: Path, *, sends_logs: bool) -> None:
    """NVFlare builds the filters from the page's privacy.json, and applies them to a task."""
    installed("nvflare")
    from nvflare.apis.dxo import DXO, DataKind, from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.apis.fl_context import FLContextManager
    from nvflare.apis.utils.task_utils import apply_filters
    from nvflare.apis.workspace import Workspace
    from nvflare.private.fed.app.fl_conf import create_privacy_manager
    from nvflare.private.privacy_manager import Scope

    for name in ("local", "startup"):
        (folder / name).mkdir()
    page = (EXAMPLES.parent / "docs" / "guard.md").read_text(encoding="utf-8")
    policy = page.split("```json\n")[1].split("```")[0]
    (folder / "local" / "privacy.json").write_text(policy.replace("/data/guard", str(folder)))
    resources = json.dumps({"allow_log_streaming": sends_logs})
    (folder / "local" / "resources.json").write_text(resources)
    manager = create_privacy_manager(Workspace(str(folder), "site-1"), names_only=False)
    site = TaskContext()
    context = FLContextManager(site.get_engine(), "site-1", "job").new_context()
    for component in manager.components.values():
        component.handle_event(EventType.ABOUT_TO_START_RUN, context)
    private = {
        FLContextKey.SCOPE_OBJECT: manager.get_scope(""),
        FLContextKey.WORKSPACE_ROOT: str(folder),
        FLContextKey.TASK_NAME: "train",
    }
    for key, value in private.items():
        context.set_prop(key, value, private=True, sticky=False)

    def filtered(name: str, value: float, direction: str) -> Any:
        data = {"w": np.full(4, value, np.float32)}
        content = DXO(DataKind.WEIGHTS, data).to_shareable()
        return apply_filters(name, content, context, {}, "train", direction)

    if sends_logs:
        with raises(MessageError, "guard.logs"):
            filtered(Scope.TASK_DATA_FILTERS_NAME, 0, "in")
        return
    filtered(Scope.TASK_DATA_FILTERS_NAME, 0, "in")
    with raises(MessageError, "guard.peer"):
        filtered(Scope.TASK_DATA_FILTERS_NAME, 1e6, "out")
    answer = from_shareable(filtered(Scope.TASK_RESULT_FILTERS_NAME, 1e6, "out"))
    assert np.abs(answer.data["w"]).max() < 20
    assert rows(folder, "site-1") == 1


@pytest.mark.slow
def test_nvflare_example_runs_behind_the_guard(tmp_path: Path) -> None:
    """The job of three rounds spends each site's budget; a second run is refused."""
    installed("nvflare")
    run = runpy.run_path(str(EXAMPLES / "guarded_nvflare.py"))["run"]
    script = EXAMPLES / "guarded_nvflare_client.py"
    model = run(script, tmp_path / "guard", tmp_path / "simulation")
    assert np.load(model).shape == (3, 3)
    for site in ("site-1", "site-2"):
        assert rows(tmp_path / "guard", site) == 3
    assert verify_run(tmp_path / "guard").problems == []
    with pytest.raises(RuntimeError, match="Simulation failed"):
        run(script, tmp_path / "guard", tmp_path / "simulation")
    assert rows(tmp_path / "guard", "site-1") == 3
