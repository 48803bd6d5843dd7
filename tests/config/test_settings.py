"""Settings and their errors, partial participation, and the names that follow the registry."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsynth as fs
from fedsynth._lazy_import import exported_names
from fedsynth.config.participation import Participation, most_rounds, shown_rounds
from fedsynth.config.settings import RUN_KINDS
from fedsynth.core.capabilities import Measurements
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import (
    FedsynthError,
    LedgerError,
    PrivacySettingError,
    SettingError,
    UnknownNameError,
)
from fedsynth.experiments.presets import preset
from fedsynth.federation.context import plan_of, public_context
from fedsynth.federation.run_data import data_set_id
from fedsynth.methods import CLASSES, METHODS, method_class, name_of
from fedsynth.privacy import Ledger, Release, epsilon
from fedsynth.results.report_facts import headline
from fedsynth.results.verification import verify_run
from fedsynth.validation import check_fields, field_types, from_mapping, in_range, to_toml
from tests.quick_runs import quick_sections
from tests.raising import raises


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar100"])
def test_settings_survive_toml_round_trip(dataset: str) -> None:
    data = {"dataset": dataset, "data_root": '/a folder/with "quotes" and ε'}
    privacy = {"noise_multiplier": 1.5, "ledger": "/ledgers"}
    for method in METHODS:
        run = {"method": method, "seed": 3, "device": "cpu"}
        resolved = fs.resolve({"run": run, "data": data, "privacy": privacy})
        assert fs.resolve(tomllib.loads(to_toml(resolved.to_mapping()))) == resolved
    own = fs.resolve({"data": {"folder": "scans", "slice": 0, "window": "0,9"}})  # 0 is no default
    assert fs.resolve(tomllib.loads(to_toml(own.to_mapping()))) == own


@pytest.mark.parametrize("two", [2, np.float32(2), np.int64(2)])
def test_numbers_of_float_settings_become_floats(two: Any) -> None:
    """Regression: a server refused σ = 2, and `privacy verify` reported lr = 1."""
    privacy = fs.PrivacySettings(noise_multiplier=two)
    run = fs.RunSettings(fs.FedAvg(lr=two), memory_gb=two, privacy=privacy)
    own = make_dataclass("Own", [("rate", float)])(two)  # types, not text, as in a user's file
    check_fields(own)
    values = (privacy.noise_multiplier, run.method.lr, run.memory_gb, own.rate)
    assert [(type(value), value) for value in values] == [(float, 2.0)] * 4


texts = st.text(st.characters(exclude_categories=["Cs"]))  # TOML cannot hold lone surrogates


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,9}", fullmatch=True),
        texts | st.integers() | st.booleans() | st.floats(allow_nan=False),
    )
)
def test_toml_preserves_every_value(values: dict[str, Any]) -> None:
    read = tomllib.loads(to_toml({"section": values}))["section"]
    assert read == values
    assert [type(read[key]) for key in values] == list(map(type, values.values()))


def test_settings_override_presets_and_defaults() -> None:
    merged = fs.resolve({"model": {"width": 16}})
    assert (merged.method.name, merged.dataset) == ("feddm", "digits")
    assert (merged.model.width, merged.model.depth, merged.model.norm) == (16, 2, "instance")
    assert fs.resolve({"data": {"dataset": "mnist"}}).model.depth == 3
    assert fs.resolve({"data": {"dataset": "cifar100"}}).to_mapping()["method"]["ipc"] == 5
    assert fs.resolve({"data": {"dataset": "cifar10"}}).to_mapping()["method"]["ipc"] == 10
    for number, dataset in (
        (1, "cifar10"),
        (1, "fashion-mnist"),
        (1, "cifar100"),
        (2, "domainnet10"),
    ):
        table = preset(f"fedaf:table{number}")
        cell = table.select(method="fedaf", dataset=dataset)[0]
        published: Any = table.settings(cell)
        chosen = {"run": {"method": "fedaf"}, "data": {"dataset": published.dataset}}
        method: Any = fs.resolve(chosen).method
        for key in ("image_lr", "local_weight", "global_weight"):
            assert getattr(method, key) == getattr(published.method, key), (dataset, key)
    assert fs.resolve({"run": {"method": "FedFM-Lite"}}).method.name == "fedfm-lite"
    for name in METHODS:
        method = fs.resolve({"run": {"method": name}}).method
        # a method without the preset could not be compared with the others
        assert not isinstance(method, fs.TrainsLocally) or method.batch == 32, name


def test_empty_privacy_section_means_no_privacy() -> None:
    assert fs.resolve({"privacy": {}}).privacy is None
    privacy = fs.resolve({"privacy": {"epsilon": "4", "ledger": "here"}}).privacy
    assert (privacy.epsilon, privacy.noise_multiplier) == (4.0, None)
    assert privacy.ledger == Path("here").absolute()
    with raises(PrivacySettingError, "privacy.noise_multiplier"):
        fs.resolve({"privacy": {"delta": 1e-5}})


def test_nominal_size_of_natural_clients_is_per_group() -> None:
    """Also where fewer clients than writers take part; other partitions divide all examples."""
    spec = dataset_spec("femnist")
    for kind, pieces in (("natural", 3_550), ("iid", 100)):
        partition = {"clients": 100, "kind": kind}
        run = fs.resolve({"data": {"dataset": "femnist"}, "partition": partition})
        context = public_context(run, spec, torch.device("cpu"))
        assert context.nominal_size == spec.train_size / pieces
    synthetic = fs.resolve({"data": {"dataset": "synthetic(0.5,1)"}})
    assert synthetic.partition == fs.PartitionSettings("natural", 30)
    assert synthetic.model.name == "linear"


SETTINGS: tuple[tuple[Any, dict[str, Any]], ...] = (
    *((method_class(name), {}) for name in METHODS),
    (fs.PartitionSettings, {}),
    (fs.ModelSettings, {}),
    (fs.PrivacySettings, {"noise_multiplier": 1.0}),
    (fs.RunSettings, {"method": method_class("feddm")()}),
)
BAD = {int: (-(10**9),), float: (-1e9, math.nan), str: ("no such thing",)}
ANYTHING = {  # checked only with the run's data, method and machine
    "method": ("proxy",),
    "partition": ("seed",),
    "privacy": ("ledger", "mechanism"),
    "run": ("dataset", "device", "seed"),
}


@pytest.mark.parametrize(("cls", "base"), SETTINGS)
def test_errors_name_section_and_key(cls: Any, base: dict[str, Any]) -> None:
    def convert(values: dict[str, Any]) -> object:
        if cls is fs.RunSettings:
            return fs.resolve({"run": values})
        return from_mapping(cls, {**base, **values})

    def error_of(make: Callable[[dict[str, Any]], object], name: str, invalid: object) -> str:
        with pytest.raises((SettingError, PrivacySettingError, UnknownNameError)) as caught:
            make({name: invalid})
        assert (caught.value.section, caught.value.key) == (cls.section, name)
        return str(caught.value)

    for name, kind in field_types(cls).items():
        for invalid in () if name in ANYTHING.get(cls.section, ()) else BAD.get(kind, ()):
            message = error_of(lambda values: cls(**{**base, **values}), name, invalid)
            assert str(invalid) in message
            # unknown names are of a method, a model, a data set
            assert message.startswith((f"{cls.section}.{name} ", "unknown "))
    for name, kind in (RUN_KINDS if cls is fs.RunSettings else field_types(cls)).items():
        for invalid in ("no such thing", [1]) if kind in (bool, int, float) else ():
            message = error_of(convert, name, invalid)
            assert message.startswith(f"{cls.section}.{name} must be ")
    assert error_of(convert, "no_such_setting", 1).startswith("unknown ")


@dataclass(frozen=True)
class Sample:
    """Settings with a field of every type."""

    section: ClassVar[str] = "own"

    number: int = 1
    rate: float = 1
    flag: bool = False
    text: str = ""
    bound: float | None = None
    few: int = in_range(2, 2, 5)
    share: float = in_range(0.5, 0, 1)
    scale: float = in_range(2.0, 2)


values = st.integers(-(2**63), 2**63) | st.floats(-3e38, 3e38) | st.booleans()


def test_out_of_range_numbers_are_rejected() -> None:
    """Also as text, and in digits of other scripts, which Python accepts."""
    for key in ("number", "rate"):
        for value in (10**400, "9" * 400, "9" * 5000, 1e39, "1e39", "١٢", [1], None):
            with pytest.raises(SettingError) as caught:
                from_mapping(Sample, {key: value})
            assert len(str(caught.value)) < 300
    for value in (2**63, 1.5, True, math.inf):
        with pytest.raises(SettingError):
            from_mapping(Sample, {"number": value})
    for value in ("nan", math.nan, "1e999"):
        with raises(SettingError, "own.bound"):
            from_mapping(Sample, {"bound": value})
    assert from_mapping(Sample, {"bound": "2", "number": 3.0}) == Sample(number=3, bound=2.0)


@pytest.mark.parametrize("value", [5, True, math.inf, "a\0b"])
def test_paths_must_be_text(value: Any) -> None:
    for section, key in (("data", "data_root"), ("data", "folder"), ("privacy", "ledger")):
        with pytest.raises(FedsynthError, match=r"must be |is not UTF-8 text"):
            fs.resolve({section: {key: value}})


@given(st.integers(-(10**15), 10**15), values, st.booleans(), st.text(max_size=20))
def test_text_and_values_convert_equally(number: int, rate: float, flag: bool, text: str) -> None:
    """A float field stays one if its default is written as 1."""
    as_text = {"number": str(number), "rate": str(float(rate)), "flag": str(flag), "text": text}
    expected = Sample(number, float(rate), flag, text)
    assert from_mapping(Sample, as_text) == expected
    assert from_mapping(Sample, {**as_text, "rate": float(rate), "flag": flag}) == expected


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"share": math.nan}, r"share must be a finite number"),
        ({"share": math.inf}, r"share must be a finite number"),
        ({"share": 10**400}, r"share must be between 0 and 1"),
        ({"share": "1"}, r"share must be a number, got "),
        ({"few": 1}, r"few must be between 2 and 5, got 1$"),
        ({"few": 2.5}, r"few must be a whole number, got 2.5$"),
        ({"scale": 1}, r"scale must be at least 2, got 1$"),
    ],
)
def test_values_outside_declared_ranges_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=rf"^own\.{text}"):
        check_fields(Sample(**values))
    check_fields(Sample(few=5, share=1, scale=1e9))


def test_setting_errors_can_be_moved() -> None:
    error = SettingError("a", "b", "needs c.d=1: so", value=5)
    assert str(error) == "a.b=5 needs c.d=1: so"
    moved = error.of("x", "y")
    assert (type(moved), str(moved)) == (SettingError, "x.y=5 needs c.d=1: so")
    assert str(SettingError(None, "columns", "must be odd")) == "columns must be odd"


def tiny(method: str = "fedavg", /, run: Any = (), **sections: Any) -> fs.RunSettings:
    """Returns the settings of a quick run with half of four clients a round."""
    half = {"rounds": 3, "participation": 0.5, **dict(run)}
    sections = {"partition": {"clients": 4}, **sections}
    return fs.resolve(quick_sections(method, run=half, **sections))


def test_rounds_sample_four_of_twenty_by_seed() -> None:
    draw = Participation(0, 20, 0.2)
    rounds = [draw.in_round(n) for n in range(1, 201)]
    assert all(len(set(ids)) == 4 and list(ids) == sorted(ids) for ids in rounds)
    assert rounds[:5] == [Participation(0, 20, 0.2).in_round(n) for n in range(1, 6)]
    assert rounds[:5] != [Participation(1, 20, 0.2).in_round(n) for n in range(1, 6)]
    counts = np.bincount(np.concatenate(rounds), minlength=20)
    assert counts.min() > 20  # 40 expected, deviation 5.7
    assert draw.rounds_of(3, 200) == tuple(n for n, ids in enumerate(rounds, 1) if 3 in ids)
    assert len(Participation(0, 3, 0.33).in_round(1)) == 1
    assert Participation(0, 3, 1.0).in_round(7) == (0, 1, 2)
    with raises(SettingError, "run.participation"):
        Participation(0, 10, 0.01)  # not rounded up to one client


def test_most_rounds_match_counted_rounds() -> None:
    draw, groups, rounds = Participation(3, 12, 0.3), (0, 1, 0, 2) * 3, (1, 2, 7, 40)
    expected = [
        [max(len(draw.rounds_of(k, n)) for k in range(12) if groups[k] == g) for g in range(3)]
        for n in rounds
    ]
    assert most_rounds(draw, groups, rounds).tolist() == expected
    full = most_rounds(Participation(3, 12, 1.0), groups, (1, 10**12))
    assert full.tolist() == [[1, 1, 1], [10**12] * 3]


def test_model_features_set_the_feature_map_of_a_method() -> None:
    """Regression: only the option --features did, and only for the name in lower case."""
    sections = {"run": {"method": "FedStats"}, "model": {"features": "pixels"}}
    settings: Any = fs.resolve(sections)
    assert settings.method.features == "pixels"
    with raises(SettingError, "model.features"):
        fs.resolve({**sections, "method": {"features": "pixels"}})


def test_plan_matches_composition_per_client(tmp_path: Path) -> None:
    """The reference composes the spent and the planned rows of each client."""
    terms = {"noise_multiplier": 2.0, "ledger": tmp_path, "sample_rate": 0.1, "mechanism": "dp-sgd"}
    settings = tiny(run={"rounds": 6}, privacy=terms)
    spent = Release(1, "images", "m", "c", 3.0, 1.0, 1.0, "full", 4, 7)
    for client, count in (("client-001", 1), ("client-002", 5), ("client-003", 1)):
        ledger = Ledger(client, tmp_path / f"{client}.jsonl", dataset=data_set_id(settings))
        for _ in range(count):
            ledger.charge(spent)
    run, draw = plan_of(settings), Participation(0, 4, 0.5)
    for number in run.shown_rounds:
        expected = max(
            epsilon([*history.releases, *run.planned(draw.rounds_of(k, number))], 1e-5)
            for k, history in enumerate(run.histories)
        )
        assert run.planned_epsilon(number) == pytest.approx(expected, rel=1e-12)
    assert run.planned_epsilon() == run.planned_epsilon(6)


def test_long_plans_state_epsilon_after_chosen_rounds() -> None:
    assert shown_rounds(1000) == tuple(range(1, 1001))
    assert shown_rounds(1001)[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert shown_rounds(1001)[-3:] == (800, 1000, 1001)
    assert len(shown_rounds(10**12)) < 50


def test_planning_draws_each_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a plan must not grow with the square of the rounds or with clients × rounds."""
    drawn: list[int] = []
    draw = Participation._drawn
    monkeypatch.setattr(Participation, "_drawn", lambda *args: drawn.append(args[1]) or draw(*args))
    run_section = {"rounds": 40, "participation": 0.1, "seed": 987}
    settings = tiny(run=run_section, partition={"clients": 200}, privacy={"epsilon": 8.0})
    run = plan_of(settings)
    assert list(headline(run))
    assert len(list(map(run.planned_epsilon, run.shown_rounds))) == 40
    assert sorted(drawn) == list(range(1, 41))


@pytest.mark.parametrize(
    ("method", "privacy"),
    [("fedavg", {"sample_rate": 1.0}), ("feddm", {"mechanism": "paper"})],  # paper is not checked
)
def test_unwritable_ledger_prevents_all_charges(
    method: str, privacy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = {"noise_multiplier": 3.0, "ledger": tmp_path, **privacy}
    settings = tiny(method, run={"rounds": 1, "participation": 1.0}, privacy=privacy)
    fs.simulate(settings)
    original = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    check = Ledger.check_writable

    def refuse(self: Ledger) -> None:
        if self.path == max(original):  # as root, file modes refuse nothing
            raise LedgerError("cannot write to ledger")
        check(self)

    monkeypatch.setattr(Ledger, "check_writable", refuse)
    with raises(LedgerError, "ledger.unusable"):
        fs.simulate(settings)
    assert {path: path.read_bytes() for path in original} == original


def test_epsilon_counts_rounds_of_each_client(tmp_path: Path) -> None:
    settings = tiny("feddm", run={"rounds": 4}, privacy={"epsilon": 5.0})
    result = fs.simulate(settings, output=tmp_path)
    rounds = [len(Participation(0, 4, 0.5).rounds_of(k, 4)) for k in range(4)]
    assert len(set(rounds)) > 1
    guarantee: Any = result.privacy["guarantee"]
    spent = [guarantee["epsilon_by_client"][f"client-{k:03d}"] for k in range(4)]
    assert 4.95 < max(spent) <= 5.0
    assert np.argsort(spent, kind="stable").tolist() == np.argsort(rounds, kind="stable").tolist()
    sections = settings.to_mapping()
    full = plan_of(fs.resolve({**sections, "run": {**sections["run"], "participation": 1.0}}))
    assert result.summary["differential_privacy"]["noise_multiplier"] < full.sigma
    assert verify_run(result.folder).problems == []


def test_data_set_id_ignores_local_split() -> None:
    plain = data_set_id(tiny())
    assert data_set_id(tiny(partition={"clients": 4, "local_test": 0.2})) == plain
    assert data_set_id(tiny(partition={"clients": 4, "subset": 0.5})) != plain
    # the id of the first version: ledgers are long-lived
    assert data_set_id(fs.resolve({})) == "digits-3840bad0acf7"


PACKAGE = Path(fs.__file__).parent


def test_registered_names_match_the_classes() -> None:
    for name in METHODS:
        cls = method_class(name)
        assert cls.name == name == name_of(cls.__name__)
        assert issubclass(cls, fs.Method)
        assert cls.__module__ == CLASSES[cls.__name__]
        assert getattr(fs, cls.__name__) is cls
        assert cls.__name__ in fs.__all__
    files = {p.stem for p in (PACKAGE / "methods").glob("*.py")} - {"__init__", "kit", "registry"}
    assert {module.rpartition(".")[2] for module in CLASSES.values()} == files


def test_exports_equal_the_names_of_type_checkers(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "import os as os\nfrom a import B\nfrom c.d import E as E\nfrom f import G as H\n"
        "if True:\n    from i import J as J, k as k\nfrom . import L as L\n"
    )
    assert exported_names(file) == {"E": "c.d", "J": "i", "k": "i"}
    exports = exported_names(PACKAGE / "__init__.py")
    assert set(fs.__all__) == set(exports) | set(CLASSES)
    assert {"RunSettings", "simulate", "__version__"} <= set(exports)
    for name in fs.__all__:
        assert getattr(fs, name) is not None


PAPERS: dict[str, dict[str, Any]] = {
    "feddm": {  # Secs. 4.1 and App. D.3
        "ipc": 10, "iterations": 1000, "image_lr": 1.0, "image_momentum": 0.0, "batch": 256,
        "radius": 5.0, "server_epochs": 500, "server_batch": 256, "server_lr": 0.01,
        "min_examples": 10, "restart": False, "perturbation": "sphere", "augment": "none",
        "small_class": "all", "logit_weight": 1.0,
    },
    "fedaf": {
        "ipc": 50, "iterations": 1000, "batch": 256, "image_lr": 1.0, "image_momentum": 0.9,
        "gamma": 0.9, "local_weight": 1e-4, "global_weight": 1e-2, "server_epochs": 500,
        "server_batch": 256, "server_lr": 1e-3,
    },
    "fedkf": {
        "local_epochs": 10, "batch": 64, "lr": 0.01, "distillation": 1.0, "one_hot_weight": 0.1,
        "activation_weight": 0.1, "generator_lr": 1e-3, "teacher": "oca", "final": "oca",
    },
    "fedhydra": {
        "local_epochs": 200, "batch": 128, "lr": 0.01, "bn_weight": 1.0, "ad_weight": 0.5,
        "generator_lr": 1e-3, "generator_steps": 30, "server_epochs": 200, "server_lr": 0.01,
        "stratification_steps": 30, "stratification_batch": 32, "stratification_lr": 0.001,
        "stratification_floor": 1e-8,
        "student_images": "best", "replay": True, "generator_reset": True, "learn_noise": False,
        "server_momentum": 0.9, "flips": False, "crop": 0, "generator_beta1": 0.9,
    },
    "dense": {
        "only_disagreement": True, "hard_weight": 0, "student_images": "best", "replay": True,
        "generator_reset": True, "learn_noise": True, "flips": True, "crop": 0.125,
        "generator_beta1": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_equal_the_papers(name: str) -> None:
    method = method_class(name)()
    assert {setting: getattr(method, setting) for setting in PAPERS[name]} == PAPERS[name]


def test_hooks_without_their_class_are_refused() -> None:
    """The engine would never call them. A broken version would ignore the method's own metrics."""

    class Silent(fs.FedDM):
        def facts(self, state: Any, context: Any) -> dict[str, float]:
            return {"distance": 1.0}

    class Measured(Silent, Measurements):
        metric_privacy: ClassVar[dict[str, Any]] = {}

    class Undeclared(fs.FedDM):
        first_upload = fs.ModelParameters

    class Unfinished(fs.Method):
        name, upload = "unfinished", fs.ModelParameters

    class Undecorated(fs.FedAvg):
        name, lr = "undecorated", 0.5

    class Unplanned(fs.FedAvg):
        release_plans = fs.Method.release_plans

    unfinished: Any = Unfinished
    for method in (Silent(), Undeclared(), Unplanned()):
        with raises(SettingError, "run.method"):
            fs.RunSettings(method)
    with raises(SettingError, "run.method"):
        fs.register_method(unfinished)
    with pytest.raises(SettingError, match=r"sets lr = 0\.5, which its"):
        fs.register_method(Undecorated)
    fs.RunSettings(Measured())
