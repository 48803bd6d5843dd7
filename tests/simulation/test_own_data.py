"""A user's own data: nothing is called public unasked, and every run on them is counted."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsynth.config.participation import Participation
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, FedsynthError, SettingError
from fedsynth.privacy.errors import (
    LedgerError,
    PrivacyError,
    PrivacySettingError,
    UnaccountedReleaseError,
)
from fedsynth.privacy.ledger.folder import LedgerFolder
from fedsynth.privacy.settings import NO_LEDGER, PrivacySettings
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate
from fedsynth.validation import to_toml
from tests.observers import NoteRecorder

OWN = replace(
    dataset_spec("digits"), name="scans", train_size=200, test_size=40, source="our clinic"
)
DECLARED_PUBLIC = re.compile(r"declare\w*[^.;|\n]{0,60}public")
PARTS = [np.arange(120), np.arange(120, 200)]


def scans(n: int = 200, seed: int = 0, name: str = "scans") -> ImageData:
    images = np.random.default_rng(seed).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, np.arange(n) % 10, replace(OWN, name=name))


def tiny(method: str = "feddm", **sections: Any) -> RunSettings:
    fast = {
        "feddm": {"iterations": 1, "ipc": 1, "server_epochs": 1},
        "real": {"server_epochs": 1, "min_examples": 1},
        "fedavg": {"local_epochs": 1},
    }
    run = {"method": method, "rounds": 1, "device": "cpu", **sections.pop("run", {})}
    given = {"model": {"width": 4, "depth": 2}, "method": fast[method], "run": run, **sections}
    return resolve(given)


def private(**privacy: Any) -> dict[str, Any]:
    return {"noise_multiplier": 3.0, "max_records": 1000, **privacy}


def said_of_the_data(folder: Path) -> str:
    """A report's verdict, scope and public items."""
    report = json.loads((folder / "privacy_report.json").read_text())
    return json.dumps([report[key] for key in ("verdict", "scope", "public_items")])


# ------------------------------------------------------------ ledgers are demanded
def test_own_data_need_a_ledger_or_a_declaration(tmp_path: Path) -> None:
    """Catches: 'the data are declared public' of data that their owner did not declare public."""

    def run(**privacy: Any) -> Path:
        settings = tiny(privacy=private(**privacy))
        folder = simulate(settings, data=(scans(), None), output=tmp_path / "runs").folder
        assert folder is not None
        return folder

    with pytest.raises(
        PrivacySettingError, match=r"privacy.ledger must be the folder .*'scans'.* or 'none"
    ) as caught:
        run()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
    public = run(ledger=NO_LEDGER)
    text = said_of_the_data(public)
    assert "scans: the operator's own, declared public by the operator" in text
    assert DECLARED_PUBLIC.search(text)
    assert f'ledger = "{NO_LEDGER}"' in (public / "config.toml").read_text()
    kept = run(ledger=tmp_path / "ledgers")
    assert not DECLARED_PUBLIC.search(said_of_the_data(kept))
    assert not (kept / "ledger").exists()


def test_a_published_data_set_is_named_where_no_ledger_is_kept(tmp_path: Path) -> None:
    folder = simulate(tiny(privacy=private(max_records=2000)), output=tmp_path).folder
    assert folder is not None
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["public_items"]["data set"].startswith("digits, published: scikit-learn's")
    assert not report["ledger_kept"]
    fresh = (
        (folder / "privacy_report.md")
        .read_text()
        .split("This run has no ledger that counts several runs")[1]
    )
    assert "Earlier and later runs on the same data are not counted" in " ".join(fresh.split())
    (test,) = [entry for entry in report["scope"] if entry["access"] == "test set"]
    assert test["note"].startswith("of the published data set digits")
    assert not DECLARED_PUBLIC.search(said_of_the_data(folder))


@pytest.mark.parametrize("words", ["none", "None: this data set is public!", "", "none:"])
def test_nearly_the_words_are_no_folder(words: str) -> None:
    with pytest.raises(PrivacySettingError, match="or exactly 'none: this data set is public'"):
        PrivacySettings(noise_multiplier=1.0, ledger=words)


# ---------------------------------------------------------- a ledger knows its data
def test_names_are_the_clients_and_no_other_data_are_charged_to_them(tmp_path: Path) -> None:
    settings, names = tiny(privacy=private(ledger=tmp_path / "ledgers")), ["north", "St.Mary"]
    first: Any = simulate(settings, data=(scans(), None), parts=PARTS, names=names).privacy
    assert set(first["guarantee"]["epsilon_by_client"]) == set(names)
    second: Any = simulate(
        settings, data=(scans(), None), parts=PARTS[::-1], names=names[::-1]
    ).privacy
    assert second["guarantee"]["epsilon"] > 1.3 * first["guarantee"]["epsilon"]
    changed = scans()
    changed.images[5, 0, 3, 3] ^= 1
    for data, parts, text in (
        (scans(), PARTS[::-1], "80 records of ledger .*St.Mary.jsonl"),
        (changed, PARTS, r"client 'north' has 1 records .* 1 records of the ledger"),
        (scans(seed=1), PARTS, "and 120 records of the ledger are missing"),
    ):
        with pytest.raises(LedgerError, match=text):
            simulate(settings, data=(data, None), parts=parts, names=names)
    LedgerFolder(tmp_path / "ledgers").carry_over("north")
    third: Any = simulate(settings, data=(changed, None), parts=PARTS, names=names).privacy
    assert third["guarantee"]["epsilon"] > second["guarantee"]["epsilon"]
    with pytest.raises(PrivacySettingError, match="list of 2 names"):
        simulate(settings, data=(scans(), None), parts=PARTS, names=["north"])


def test_changed_files_under_unchanged_settings_are_refused(tmp_path: Path) -> None:
    """Clients by a named partition: the settings are the same, the records are not. Where clients
    are given, another seed makes them no other records."""
    settings = tiny(partition={"kind": "iid", "clients": 2}, privacy=private(ledger=tmp_path / "a"))
    simulate(settings, data=(scans(), None))
    simulate(replace(settings, rounds=2), data=(scans(), None))
    with pytest.raises(LedgerError, match="records of the ledger are missing"):
        simulate(settings, data=(scans(seed=1), None))
    given = tiny(privacy=private(ledger=tmp_path / "b"))
    for seed in (0, 1):
        simulate(replace(given, seed=seed), data=(scans(), None), parts=PARTS)
    for name, rows in (("a", 3), ("b", 2)):
        ledgers = LedgerFolder(tmp_path / name).ledgers()
        assert {len(each.releases) for each in ledgers.values()} == {rows}


def test_hashes_of_the_same_records_differ_from_folder_to_folder(tmp_path: Path) -> None:
    """Catches: hashes without the folder's key, which anybody could compute of a guessed record."""
    seen: list[set[bytes]] = []
    for name in ("one", "two"):
        privacy = private(ledger=tmp_path / name)
        simulate(tiny(privacy=privacy), data=(scans(), None), parts=PARTS)
        lists = (path for path in (tmp_path / name / "private").iterdir() if path.suffix != ".key")
        packed = b"".join(path.read_bytes() for path in lists)
        seen.append({packed[at : at + 16] for at in range(0, len(packed), 16)})
    assert [len(hashes) for hashes in seen] == [200, 200]
    assert not seen[0] & seen[1]


def test_the_key_and_the_fingerprints_stay_where_they_are(tmp_path: Path) -> None:
    """A run leaves nothing of a kept ledger but its rows; its own ledger has no fingerprint."""
    privacy = private(ledger=tmp_path / "ledgers")
    folder = simulate(tiny(privacy=privacy), data=(scans(), None), output=tmp_path / "runs").folder
    assert folder is not None
    assert verify_run(folder, ledger=tmp_path / "ledgers").problems == []
    kept = tmp_path / "ledgers" / "private"
    secrets = [path.read_bytes() for path in kept.iterdir()]
    names = [path.name for path in kept.iterdir() if path.name != "records.key"]
    for file in (p for p in folder.rglob("*") if p.is_file()):
        content = file.read_bytes()
        assert not any(secret in content or secret.hex().encode() in content for secret in secrets)
        assert not any(name.encode() in content for name in names)
    fresh = simulate(tiny(privacy=private(max_records=2000)), output=tmp_path / "runs").folder
    assert fresh is not None
    for ledger in (fresh / "ledger").iterdir():
        header = json.loads(ledger.read_text().splitlines()[0])
        assert set(header) == {"fedsynth_ledger", "client", "dataset", "created", "chain"}


# -------------------------------------------------- runs without privacy count too
@pytest.mark.parametrize("method", ["real", "fedavg"])
def test_a_run_without_privacy_leaves_its_row_and_later_reports_say_so(
    method: str, tmp_path: Path
) -> None:
    """Catches: raw images are published, and the next report on the same data says ε = 2."""
    ledgers, notes = tmp_path / "ledgers", NoteRecorder()
    open_run = tiny(method, run={"rounds": 2}, privacy={"ledger": str(ledgers)})
    assert open_run.privacy is None
    result = simulate(open_run, data=(scans(), None), parts=PARTS, observer=notes)
    assert result.privacy is None
    assert "no later run on these data can state an ε" in notes.lines[1]
    for ledger in LedgerFolder(ledgers).ledgers().values():
        assert [row.round for row in ledger.releases] == [1, 2]
        assert all(
            "without differential privacy" in (row.unaccounted or "") for row in ledger.releases
        )
    for target in ({"epsilon": 8.0}, {"epsilon": 8.0, "noise_multiplier": None}):
        capped = {k: v for k, v in private(ledger=ledgers, **target).items() if v is not None}
        with pytest.raises(
            UnaccountedReleaseError, match="epsilon=8 cannot be guaranteed"
        ) as caught:
            simulate(tiny(privacy=capped), data=(scans(), None), parts=PARTS)
        assert f"a round of {method} (none): a run on the same data" in str(caught.value)
    later = simulate(
        tiny(privacy=private(ledger=ledgers)),
        data=(scans(), None),
        parts=PARTS,
        output=tmp_path / "runs",
    )
    assert later.folder is not None
    assert verify_run(later.folder, ledger=ledgers).problems == []
    text = (later.folder / "privacy_report.md").read_text()
    assert "no differential privacy guarantee" in text
    assert (
        f"a round of {method} (none): a run on the same data without differential privacy" in text
    )
    assert not any("epsilon" in row for row in later.metrics)
    assert later.summary["differential_privacy"]["epsilon"] is None


def test_the_row_is_there_before_anything_leaves_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsynth.methods.real import Real

    rows: list[int] = []
    step = Real.client_step

    def watched(self: Real, *args: Any) -> Any:
        rows.extend(len(each.releases) for each in LedgerFolder(tmp_path).ledgers().values())
        return step(self, *args)

    monkeypatch.setattr(Real, "client_step", watched)
    simulate(tiny("real", privacy={"ledger": tmp_path}), data=(scans(), None), parts=PARTS)
    assert set(rows) == {1}


def test_only_clients_with_releases_are_charged(tmp_path: Path) -> None:
    """Who takes part; everybody where sizes decide, or own test splits are measured."""
    (who,) = Participation(0, 2, 0.5).in_round(1)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "part": ({}, {}),
        "sizes": ({"sampling": "size"}, {}),
        "splits": ({}, {"local_test": 0.5}),
    }
    for name, (run, partition) in cases.items():
        settings = tiny(
            "fedavg",
            run={"participation": 0.5, **run},
            partition=partition,
            privacy={"ledger": str(tmp_path / name)},
        )
        simulate(settings, data=(scans(), None), parts=PARTS)
        ledgers = LedgerFolder(tmp_path / name).ledgers()
        charged = {client for client, each in ledgers.items() if each.releases}
        assert charged == ({f"client-00{who}"} if name == "part" else {"client-000", "client-001"})


def test_ledger_settings_go_through_a_config_file(tmp_path: Path) -> None:
    public = tiny(privacy=private(ledger=NO_LEDGER))
    assert public.privacy is not None
    assert (public.privacy.ledger, public.privacy.ledger_folder) == (NO_LEDGER, None)
    ledger_only = tiny("real", privacy={"ledger": str(tmp_path)})
    assert (ledger_only.privacy, ledger_only.ledger) == (None, tmp_path)
    for settings in (public, ledger_only):
        assert resolve(tomllib.loads(to_toml(settings.to_mapping()))) == settings
    assert tiny("real", privacy={"ledger": NO_LEDGER}).ledger is None
    with pytest.raises(SettingError, match=r"Set PrivacySettings\.ledger instead"):
        replace(tiny(privacy=private()), ledger=tmp_path)
    with pytest.raises(PrivacySettingError, match="noise_multiplier"):
        tiny(privacy={"ledger": str(tmp_path), "delta": 1e-6})


# ------------------------------------------------------------------------ test images
@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize("declared", [None, "private", "public", "none"])
def test_accuracy_on_private_test_images_is_in_simulation_only(
    declared: str | None, protected: bool, tmp_path: Path
) -> None:
    """Own images are private unless their owner declares them public; a run without differential
    privacy shows all."""
    without_test = declared == "none"
    data = (scans(), None if without_test else scans(40, 1))
    test = None if without_test else declared
    settings = tiny(
        "fedavg",
        run={"rounds": 2},
        privacy=private(ledger=NO_LEDGER) if protected else {},
    )
    result = simulate(settings, data=data, parts=PARTS, test=test, output=tmp_path)
    folder = result.folder
    assert folder is not None
    shown = declared == "public" or (not protected and declared != "none")
    hidden = not shown and declared != "none"
    assert (result.accuracy is None) == (declared == "none")
    assert result.summary["test_accuracy"] == (result.accuracy if shown else None)
    missing = {"none": "none"}.get(declared or "", "private")
    assert result.summary.get("test_data") == (None if shown else missing)
    for row in result.metrics:
        assert ("test_accuracy" in row) == shown
    if not protected:
        return
    rounds = (folder / "simulation_only" / "rounds.jsonl").read_text().splitlines()
    measured = [json.loads(line).get("private_test") for line in rounds]
    assert all(row is not None for row in measured) == hidden
    if hidden:
        assert measured[-1]["test_accuracy"] == result.accuracy
        for file in (p for p in folder.rglob("*") if "simulation_only" not in p.parts):
            text = file.read_bytes().decode(errors="replace") if file.is_file() else ""
            assert '"private_test"' not in text, file
            assert "test_accuracy" not in text or '"test_accuracy": null' in text, file
    report = json.loads((folder / "privacy_report.json").read_text())
    scope = {
        entry["access"]: (entry["status"], entry["note"].split(".")[0])
        for entry in report["scope"]
        if entry["access"].startswith("test set")
    }
    assert len(scope) == (declared != "none")
    if shown:
        assert scope["test set"] == ("public", "declared public by the operator")
    if hidden:
        assert {status for status, _ in scope.values()} == {"simulation-only"}


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("fedkf", {"method": {"generator_width": 4, "local_epochs": 1, "batch": 64}}),
        ("fedbn", {"method": {"local_epochs": 1}, "model": {"norm": "batch", "width": 4}}),
    ],
)
def test_methods_with_variants_and_own_models_run_without_test_images(
    method: str, sections: dict[str, Any]
) -> None:
    run = {"method": method, "rounds": 1, "device": "cpu"}
    given = {"model": {"width": 4, "depth": 2}, **sections, "partition": {"local_test": 0.3}}
    result = simulate(resolve({"run": run, **given}), data=(scans(), None), parts=PARTS)
    assert result.accuracy is None
    assert 0 <= result.metrics[-1]["local"]["amp"] <= 1
    if method == "fedkf":
        assert result.summary["models"] == {}


def test_data_and_words_that_cannot_be(tmp_path: Path) -> None:
    cases: list[tuple[Any, str | None, type[Exception], str]] = [
        ((scans(), "public"), None, DataError, "tuple \\(train, test\\)"),
        ((None, scans()), None, DataError, "fedsynth.from_arrays"),
        ((scans(), scans(name="other")), None, DataError, "same specification"),
        ((scans(), scans()), "secret", FedsynthError, "secret"),
    ]
    for data, test, kind, text in cases:
        with pytest.raises((kind, PrivacyError), match=text):
            simulate(tiny(), data=data, test=test)
