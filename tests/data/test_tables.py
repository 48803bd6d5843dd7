"""Tests of array files, tables and hub data sets: equal records, and no executed code."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import datasets
import huggingface_hub
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from torch.utils.data import DataLoader, TensorDataset

from fedsynth import FolderSettings, PrivacySettings, from_arrays, load_records, resolve
from fedsynth.data import tables
from fedsynth.data.describe import describe_folder
from fedsynth.data.files import read_tensors
from fedsynth.data.images import record_digests
from fedsynth.data.own_data import read_as, read_own_data
from fedsynth.data.shared_set import UNITS, shared_set, write_set
from fedsynth.data.tables import parts_of, read_part
from fedsynth.errors import DataError, FedsynthError, LedgerError, PrivacySettingError, SettingError
from fedsynth.federation.run_data import data_of_run
from fedsynth.simulation.simulate import simulate
from tests.raising import raises

N = 60
Y = np.arange(N) % 3
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
X[np.arange(N), Y] += 3
PATIENTS = 100 + np.arange(N) // 2
SITES = np.where(np.arange(N) < 30, "south", "north")
ARRAYS = {"x": X, "y": Y, "patients": PATIENTS, "site": SITES}
TABLE = pa.table(
    {
        **{f"f{column}": X[:, column] for column in range(4)},
        "label": Y.astype(np.float64),
        "patient": [f"p{number:03}" for number in PATIENTS],
        "hospital": pa.array(SITES).dictionary_encode(),
        "remark": [None, *["none"] * (N - 1)],
        "day": pa.array([0] * N, pa.date32()),
    }
)
MAP = pa.map_(pa.string(), pa.int64())
COLUMNS = dict.fromkeys(("feature", "label", "site", "user"), "")


def write_npy(path: Path) -> None:
    for name, array in ARRAYS.items():
        np.save(path.with_name(f"scans_{name}.npy"), array)
    np.save(path.with_name("other_y.npy"), Y[:3])  # has another prefix


def write_csv(path: Path, delimiter: str = ",") -> None:
    options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
    pa.csv.write_csv(TABLE.set_column(6, "hospital", pa.array(SITES)), path, options)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a spreadsheet's byte-order mark


def write_vectors(path: Path) -> None:
    columns = {"embedding": list(X.astype(np.float64)), "target": Y, "person": PATIENTS}
    pa.parquet.write_table(pa.table({**columns, "client": SITES}), path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "scans.npz": lambda path: np.savez(path, **ARRAYS),
    "double.npz": lambda path: np.savez_compressed(path, **{**ARRAYS, "x": X.astype(">f8")}),
    "scans_x.npy": write_npy,
    "scans.safetensors": lambda path: save_file(
        {"x": X, "y": Y, "user": PATIENTS, "site": (SITES == "south").astype(np.uint8)}, path
    ),
    "scans.parquet": lambda path: pa.parquet.write_table(TABLE, path),
    "vectors.parquet": write_vectors,
    "scans.csv": write_csv,
    "excel.csv": lambda path: write_csv(path, ";"),
    "scans.tsv": lambda path: write_csv(path, "\t"),
}


@pytest.mark.filterwarnings("ignore:features in")
@pytest.mark.parametrize("name", WRITERS)
def test_formats_give_equal_records(name: str, tmp_path: Path) -> None:
    """Equal hashes let a ledger notice the same records in another file."""
    WRITERS[name](tmp_path / name)
    loaded = load_records(tmp_path / name, bounds="-8,8")
    reference = from_arrays(X, Y, loaded.train.spec)
    rows = np.arange(N)
    assert (record_digests(loaded.train, rows, b"") == record_digests(reference, rows, b"")).all()
    assert loaded.train.groups.tolist() == [number // 2 for number in range(N)]
    assert len(loaded.names) == 2
    south = loaded.names.index("south" if "south" in loaded.names else "1")
    assert loaded.sites[south].tolist() == list(range(30))
    assert loaded.train.spec.class_names == ("0", "1", "2")


def test_medmnist_files_stay_bytes_in_both_axis_orders(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
    arrays: dict[str, Any] = {}
    for part, rows in (("train", slice(4)), ("val", slice(4, 5)), ("test", slice(5, 6))):
        arrays[f"{part}_images"] = pixels[rows]
        arrays[f"{part}_labels"] = np.arange(6, dtype=np.uint8)[rows, None] % 2
    np.savez(tmp_path / "med.npz", **arrays)
    notes: list[str] = []
    settings = resolve({"data": {"dataset": f"medmnist:{tmp_path / 'med.npz'}"}}).folder
    loaded = read_own_data(settings, notes.append, declaration=None)
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    assert torch.equal(loaded.train.images, expected[:4])
    assert torch.equal(loaded.test.images, expected[5:])
    assert (loaded.test.labels.tolist(), loaded.test_kind) == ([1], "private")
    assert any("val records" in note for note in notes)
    np.savez(tmp_path / "first.npz", x=expected.numpy(), y=np.arange(6) % 2)
    assert torch.equal(load_records(tmp_path / "first.npz").train.images, expected)
    named = replace(loaded.train.spec, class_names=("well", "ill"))
    test = read_as(settings, named, print, "test")
    assert test.labels.tolist() == [1]


def test_volumes_need_a_slice_which_receivers_apply_too(tmp_path: Path) -> None:
    """MedMNIST3D: volumes are no images of 9 channels. time series and 5 bands stay as they are."""
    volumes = np.random.default_rng(1).integers(0, 256, (6, 9, 9, 9), dtype=np.uint8)
    file, labels = tmp_path / "organs.npz", np.arange(6) % 2
    np.savez(file, x=volumes, y=labels)
    with raises(DataError, "data.volumes"):
        load_records(file)
    described = describe_folder(FolderSettings(str(file), slice=4), print)
    described.path.write_text(described.toml)
    train = load_records(file).train
    assert torch.equal(train.images[:, 0], torch.from_numpy(volumes[:, 4]))
    test = read_as(FolderSettings(str(file)), train.spec, print, "test")
    assert torch.equal(test.images, train.images)
    described.path.unlink()
    other = load_records(file, slice=5).train  # for ledgers, these are the same records
    digests = [record_digests(data, np.arange(6), bytes(8)) for data in (train, other)]
    assert np.array_equal(*digests)
    with raises(SettingError, "data.slice"):
        load_records(file, slice=9)
    np.savez(file, x=volumes[:, :5], y=labels)
    assert load_records(file).train.spec.image_shape == (5, 9, 9)


@pytest.mark.filterwarnings("ignore:features in")
@pytest.mark.parametrize(
    ("name", "change", "settings", "message"),
    [
        ("a.npz", {}, {}, "need public bounds"),
        ("a.npz", {}, {"label_column": "z"}, "'z' is missing .*x, y, .*--label-column"),
        ("a.npz", {"x": np.array([{}] * N)}, {}, "Python objects"),
        ("a.npz", {"y": Y[:5]}, {}, "60 values, one for each record, got 5"),
        ("a.npz", {"y": Y + 0.5}, {}, "text, or whole numbers up to 2.53, got 0.5"),
        ("a.npz", {"y": Y + 1e30}, {}, "text, or whole numbers up to 2.53, got 1e.30"),
        ("a.parquet", {"label": pa.array([b"a", b"b"] * (N // 2))}, {}, "numbers or text, got byt"),
        ("a.npz", {}, {"image_size": "4"}, "data.image_size has no effect on arrays and tables"),
        ("a.csv", {}, {"skip_corrupt": True}, "data.skip_corrupt has no effect"),
        ("a.npz", {"x": np.full((N, 4), np.nan)}, {"bounds": "0,1"}, "NaN"),
        ("a.npz", {"site": np.where(Y, "A b", "a_b")}, {}, "spellings of one name"),
        ("a.csv", {}, {"feature_columns": "f0,remark"}, "not numeric.*--feature-columns"),
        ("a.csv", {"f1": pa.array([None, *X[1:, 1]])}, {}, "1 cells are empty"),
        ("a.csv", {"label": pa.array([None, *Y[1:]])}, {}, "1 cells are empty"),
        ("a.parquet", {"label": pa.array([{"a": 1}] * N)}, {}, "one number or text per row"),
        ("a.parquet", {"label": pa.array([[("a", 1)]] * N, MAP)}, {}, "one number or text per row"),
        (
            "a.parquet",
            {"split": pa.array([{"a": 1}] * N)},
            {},
            "'split' .* one number or text per",
        ),
        ("a.npz", {}, {"bounds": "3,1"}, "two ascending numbers"),
        ("a.npz", {}, {"test": "public", "bounds": "0,1"}, "has no effect without test records"),
        ("a.npz", {"y": np.int64(1)}, {}, "'y' .* one value per record, got a single value"),
        ("a.npz", {"x": X[:0]}, {}, "'x' .* contain no records"),
        ("a.npz", {"z": Y[:3]}, {"feature_columns": "x,z"}, "columns of the same length, got"),
        ("a.npz", {"split": np.where(Y, "train", "val")}, {}, r"splits train, val .*test_folder"),
        ("a.csv", {"fold": Y}, {}, r"splits 0, 1, 2 in the column 'fold'"),
        (
            "a.csv",
            {"subject_id": Y},
            {},
            "several columns .* user column: patient, subject_id.*--user-column",
        ),
        ("a.csv", {"f1": ["x", *map(str, X[1:, 1])]}, {}, "'f1' .* also 'x'.*--feature-columns"),
        ("a.csv", {"f1": [f"{x:.3f}".replace(".", ",") for x in X[:, 1]]}, {}, "numbers, but also"),
        ("a.csv", {"f1": ["NaN"] * N}, {}, "'f1' .* all cells are empty"),
        ("a.parquet", {"f1": pa.nulls(N)}, {}, "'f1' .* all cells are empty"),
        ("a.parquet", {"f1": pa.nulls(N, pa.float32())}, {}, "'f1' .* all cells are empty"),
        ("a.parquet", {"f1": [[0.0]] + [[0.0, 1.0]] * (N - 1)}, {}, "lists of different lengths"),
    ],
)
def test_unusable_files_raise_one_line_errors(
    name: str, change: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if name == "a.npz":
        np.savez(tmp_path / name, **{**ARRAYS, **change})
    else:
        columns = {key: TABLE[key] for key in TABLE.column_names if key != "hospital"}
        write = pa.csv.write_csv if name == "a.csv" else pa.parquet.write_table
        write(pa.table({**columns, **change}), tmp_path / name)
    with pytest.raises(FedsynthError, match=message) as caught:
        load_records(tmp_path / name, **settings)
    assert "\n" not in str(caught.value)


def test_files_whose_names_differ_in_case_are_not_confused(tmp_path: Path) -> None:
    for name, values in {"x": X, "X": -X, "y": Y}.items():
        np.save(tmp_path / f"{name}.npy", values)
    train = load_records(tmp_path / "x.npy", bounds="-9,9").train
    assert torch.allclose(18 * train.images.flatten(1) - 9, torch.from_numpy(X).float(), atol=1e-5)


def test_repeated_columns_and_parts_of_other_types_are_named(tmp_path: Path) -> None:
    repeated = pa.Table.from_arrays([pa.array(X[:, 0])] * 2, names=["e", "e"])
    pa.parquet.write_table(repeated, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns are named 'e'"):
        load_records(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "parts").mkdir()
    numbers, lists = pa.float32(), pa.list_(pa.uint8())
    for first, second in ((numbers, pa.float64()), (lists, pa.list_(pa.int64()))):
        for number, kind in enumerate((first, second)):
            cells = (
                [[1, 300 * number]] * N if kind in (second, lists) and first == lists else [1.5] * N
            )
            table = pa.table({"e": pa.array(cells, kind), "f": X[:, 1], "label": Y})
            pa.parquet.write_table(table, tmp_path / "parts" / f"train-{number}.parquet")
        with pytest.raises(DataError, match=r"'e' has the types .* and .* in two parts"):
            load_records(f"hf:{tmp_path / 'parts'}", bounds="-9,9", feature_columns="e")
    pa.parquet.write_table(table.drop_columns("e"), tmp_path / "parts" / "train-1.parquet")
    with pytest.raises(DataError, match="one part has no column 'e'"):
        load_records(f"hf:{tmp_path / 'parts'}", bounds="-9,9", feature_columns="e")


def test_expanding_arrays_and_tables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that are not larger than their file have any size. The declared sizes of a table are
    checked before the columns are read, and the real sizes after it."""
    monkeypatch.setattr(tables, "MAX_EXPANDED_BYTES", 2**16)
    np.savez(tmp_path / "plain.npz", x=np.zeros(2**17, np.uint8))
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(2**17, np.uint8))
    assert parts_of(str(tmp_path / "plain.npz"))["train"].read("x").size == 2**17
    with pytest.raises(DataError, match=r"'x' in .* exceed 65,536 bytes\. Split"):
        parts_of(str(tmp_path / "bomb.npz"))["train"].read("x")
    monkeypatch.setattr(tables, "MAX_EXPANDED_BYTES", 2**19)
    path = tmp_path / "bomb.parquet"
    for rows, repeats in ((100_000, True), (100_000, False), (200_000, True)):
        table = pa.table({"x": np.zeros(rows)})  # of at least 4 bytes, and really 8 bytes
        pa.parquet.write_table(table, path, compression="zstd", use_dictionary=repeats)
        with pytest.raises(DataError, match="exceed 524,288 bytes"):
            parts_of(str(path))["train"].read("x")
        monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", None)


def test_parquet_reads_needed_columns_and_stores_repeated_text_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pa.parquet.ParquetFile.iter_batches
    read = create_autospec(original, side_effect=original)
    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", read)
    monkeypatch.setattr(tables, "MAX_EXPANDED_BYTES", 2**20)
    rows = 10_000  # 10 MB of text
    table = pa.table({"x": np.zeros(rows), "label": ["a" * 1000] * rows, "note": ["b"] * rows})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    records = read_part(parts_of(str(tmp_path / "a.parquet"))["train"], COLUMNS, print)
    assert records.class_names == ("a" * 1000,)
    assert sorted(call.kwargs["columns"] for call in read.call_args_list) == [["label"], ["x"]]


def test_files_without_labels_or_with_image_paths_are_no_tables(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "list.csv").write_text("Image;label\na.png;ill\n")
    np.savez(tmp_path / "empty.npz")
    with raises(DataError, "data.label_column"):
        load_records(tmp_path / "empty.npz")
    assert load_records(tmp_path / "list.csv").train.spec.class_names == ("ill",)


# ------------------------------------------------------------------------------- private runs


def sign(path: Path, bounds: str) -> None:
    text = path.read_text().replace("bounds = []", f"bounds = {bounds}")
    path.write_text(text.replace('by = ""', 'by = "a"').replace('date = ""', 'date = "2026-11-22"'))


def settings_of(partition: dict[str, Any], **more: dict[str, Any]) -> Any:
    sections = {"run": {"method": "fedavg", "rounds": 1}, "method": {"local_steps": 1}}
    return resolve({**sections, "model": {"name": "linear"}, "partition": partition, **more})


def private(file: Path, columns: str = "", kind: str = "given", **changes: Any) -> Any:
    privacy = {"epsilon": 1.0, "nominal_size": 15, **changes}
    data = {"folder": str(file), "feature_columns": columns}
    partition = {"kind": kind, **({"clients": 1} if kind != "given" else {})}
    return simulate(settings_of(partition, data=data, privacy=privacy), quiet=True)


def test_private_runs_on_files_need_signed_bounds(tmp_path: Path) -> None:
    file = tmp_path / "scans.npz"
    np.savez(file, **ARRAYS)
    draft = describe_folder(FolderSettings(str(file)), print)
    assert (draft.path, "bounds = []" in draft.toml) == (tmp_path / "scans.fedsynth.toml", True)
    assert not re.search(rf"\b{N}\b", draft.toml)
    with raises(DataError, "declaration.missing"):
        private(file)
    draft.path.write_text(draft.toml)
    with raises(DataError, "declaration.signature"):
        private(file)
    sign(draft.path, "[]")
    with raises(SettingError, "data.bounds"):
        load_records(file, bounds="-8,8")
    with raises(DataError, "data.bounds"):
        private(file, unit="record")
    assert not (tmp_path / "fedsynth-ledger").exists()
    sign(draft.path, "[-8, 8]")
    with raises(SettingError, "data.bounds"):
        load_records(file, bounds="0,1")
    with raises(PrivacySettingError, "privacy.unit"):
        private(file)
    private(file, unit="user")
    ledgers = {path.name for path in tmp_path.glob("fedsynth-ledger/scans/*.jsonl")}
    assert ledgers == {"north.jsonl", "south.jsonl"}
    shutil.copy(file, tmp_path / "other.npz")
    other = describe_folder(FolderSettings(str(tmp_path / "other.npz")), print)
    assert 'ledger = "fedsynth-ledger/other"' in other.toml  # with the same names of sites
    draft.path.write_text(draft.path.read_text().replace('"0", "1", "2"', '"0", "1", "3"'))
    with raises(DataError, "declaration.undeclared"):
        private(file, unit="user")


def test_ledgers_recognise_records_in_another_format(tmp_path: Path) -> None:
    np.savez(tmp_path / "scans.npz", **ARRAYS)
    new_names = pa.array([f"new {site}" for site in SITES])
    pa.csv.write_csv(TABLE.set_column(6, "hospital", new_names), tmp_path / "table.csv")
    for name in ("scans.npz", "table.csv"):
        draft = describe_folder(FolderSettings(str(tmp_path / name)), print, "scans")
        draft.path.write_text(draft.toml)
        sign(draft.path, "[-8, 8]")
    private(tmp_path / "scans.npz", unit="record")
    with raises(LedgerError, "ledger.moved_records"):
        private(tmp_path / "table.csv", unit="record")


@pytest.mark.parametrize("has_lists", [False, True])
def test_ledgers_recognise_records_by_columns_that_a_run_does_not_use(
    has_lists: bool, tmp_path: Path
) -> None:
    """Other, fewer or reordered features of the same table are the same records.

    Columns with empty cells may stay unused.
    """
    file = tmp_path / "table.parquet"
    table = TABLE.append_column("gap", pa.array([None, *range(N - 1)], pa.int32()))
    if has_lists:
        table = table.drop_columns("f3").append_column("f3", pa.array(list(X[:, 2:])))
    pa.parquet.write_table(table, file)
    path = file.with_suffix(".fedsynth.toml")

    def declared_run(columns: str, kind: str) -> None:
        chosen = FolderSettings(str(file), feature_columns=columns)
        path.write_text(describe_folder(chosen, print).toml)
        sign(path, "[-8, 8]")
        private(file, columns, kind, unit="record")

    declared_run("f0,f1,f2,f3", "given")
    for columns in ("f3", "f2,f0"):
        with raises(LedgerError, "ledger.moved_records"):
            declared_run(columns, "iid")
    with raises(DataError, "data.test_features"):  # the declaration names the columns
        private(file, "f1", "iid", unit="record")


def test_columns_are_those_of_the_declaration_in_its_order(tmp_path: Path) -> None:
    """Also for files that a shared set's users and later periods read."""
    file, other = tmp_path / "table.csv", tmp_path / "other.csv"
    pa.csv.write_csv(TABLE, file)
    pa.csv.write_csv(TABLE.select(["label", "f3", "f1", "f0", "f2"]), other)
    settings = FolderSettings(str(file), bounds="-8,8")
    train = load_records(file, bounds="-8,8").train
    assert train.spec.features == ("f0", "f1", "f2", "f3")
    place = tmp_path / "synthetic.safetensors"
    write_set(place, train.images.float(), train.labels, train.spec, pixels=UNITS)
    spec = shared_set(*read_tensors(place)).spec
    again = read_as(replace(settings, folder=str(other)), spec, print, "test")
    assert torch.equal(again.images, train.images)
    draft = describe_folder(settings, print)
    draft.path.write_text(draft.toml)
    pa.csv.write_csv(TABLE.select(["label", "f3", "f1", "f0", "f2", "hospital"]), file)
    assert torch.equal(load_records(file).train.images, train.images)
    pa.csv.write_csv(TABLE.rename_columns(["f4", *TABLE.column_names[1:]]), file)
    with raises(DataError, "data.column"):
        load_records(file)


def test_lists_are_matched_by_their_columns(tmp_path: Path) -> None:
    columns = {"e": pa.array(list(X[:, :3].astype(np.float64))), "b": X[:, 3], "label": Y}
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    swapped = pa.table({"more": X[:, 0], **{name: columns[name] for name in ("b", "e", "label")}})
    pa.parquet.write_table(swapped, tmp_path / "b.parquet")
    files = {"place": tmp_path / "a.parquet", "test_folder": str(tmp_path / "b.parquet")}
    loaded = load_records(**files, bounds="-8,8")
    assert torch.equal(loaded.test.images, loaded.train.images)
    assert loaded.train.spec.features == ("e[0]", "e[1]", "e[2]", "b")
    one = load_records(tmp_path / "a.parquet", feature_columns="e", bounds="-8,8")
    assert one.train.spec.features == ()  # 512 numbers of an embedding need no names


# ------------------------------------------------------------------------------------------ hub


def test_hubs_keep_class_names_splits_and_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["well", "ill"])}
    )
    hub = tmp_path / "scans"
    pictures = [Image.new("L", (8, 9), 10 * number) for number in range(6)]
    for split, rows in {"train": range(4), "test": range(3, 6)}.items():
        values = {"image": [pictures[row] for row in rows], "label": [row % 2 for row in rows]}
        data = datasets.Dataset.from_dict(values, features=features)
        data.to_parquet(hub / "data" / f"{split}-00000-of-00001.parquet")
    (hub / "scans.py").write_text("raise SystemExit('code of a hub was executed')")
    (hub / "train.pkl").write_bytes(b"cos\nabort\n(tR.")
    folder = resolve({"data": {"dataset": f"hf:{hub}"}}).folder
    loaded = read_own_data(folder, print, declaration=None)
    assert loaded.train.spec.class_names == ("well", "ill")
    assert loaded.train.images[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    assert loaded.train.images.shape == (4, 1, 9, 8)
    assert loaded.test.labels.tolist() == [1, 0, 1]
    snapshot = Mock(return_value=str(hub))
    info = SimpleNamespace(dataset_info=lambda name, revision: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    settings = settings_of({"kind": "iid", "clients": 2}, data={"dataset": "hf:clinic/scans"})
    result = simulate(settings, quiet=True)
    assert result.settings.folder.revision == "c0ffee"
    assert snapshot.call_args.args == ("clinic/scans",)
    assert snapshot.call_args.kwargs["revision"] == "c0ffee"
    assert snapshot.call_args.kwargs["allow_patterns"] == ["*.parquet", "*.safetensors"]
    (hub / "other").mkdir()
    shutil.copy(hub / "data" / "train-00000-of-00001.parquet", hub / "other")
    with raises(DataError, "data.several_sets"):
        parts_of("hf:clinic/scans")
    shutil.move(hub / "other" / "train-00000-of-00001.parquet", hub)
    with raises(DataError, "data.several_sets"):
        parts_of("hf:clinic/scans")
    assert len(parts_of("hf:clinic/scans/data")) == 2


@pytest.mark.filterwarnings("ignore:features in")
@pytest.mark.parametrize("names", [("1", "0"), ("1", "2"), tuple(sorted(map(str, range(12))))])
@pytest.mark.parametrize("place", ["hf:{}", "{}/a.parquet"])
def test_stated_names_are_those_of_the_stored_positions(
    names: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    """The folders 0 to 11 are the classes 0, 1, 10, 11, 2, … of a hub's data set."""
    label, sex = (datasets.ClassLabel(names=list(given)) for given in (names, ("female", "male")))
    rows = np.arange(24) % len(names)
    columns = {"f": X[:24, 0], "label": rows, "sex": rows % 2, "site": rows % 2}
    features = datasets.Features({"f": datasets.Value("float32"), "label": label, "sex": sex})
    data = datasets.Dataset.from_dict(columns, features=datasets.Features(**features, site=sex))
    data.to_parquet(tmp_path / "a.parquet")
    file = place.format(tmp_path)
    train = load_records(file, bounds="-8,8").train
    assert (train.spec.class_names, train.spec.width) == (names, 1)
    assert train.labels.tolist() == rows.tolist()
    for changed in (data, data.remove_columns("label")):
        changed.to_parquet(tmp_path / "a.parquet")
        loaded = load_records(file, bounds="-8,8", label_column="sex")
        assert loaded.train.spec.class_names == loaded.names == ("female", "male")
        assert loaded.train.labels.tolist() == (rows % 2).tolist()
    other = data.cast_column("label", datasets.ClassLabel(names=list(names[::-1])))
    other.to_parquet(tmp_path / "b.parquet")
    with raises(DataError, "data.class_names"):
        load_records(f"hf:{tmp_path}")
    schema = data.select_columns(["f", "label"]).data.schema
    table = pa.table({"f": [0.5, 1], "label": [0, -1]}, schema)
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with raises(DataError, "data.label_numbers"):
        load_records(tmp_path / "a.parquet", bounds="-8,8")


def test_images_without_bytes_are_named_and_nested_lists_are_read(tmp_path: Path) -> None:
    """16-bit images have the window of the settings or the declaration."""
    file = tmp_path / "images.parquet"
    Image.fromarray(np.array([[2000, 2040], [2080, 2255]], np.uint16)).save(tmp_path / "a.png")
    good = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for cell, message in (
        (None, "row 2 contains no image.*store the image's bytes"),
        ({"bytes": None, "path": "b.png"}, "only the path b.png.*store the image's bytes"),
        ({"bytes": b"x", "path": None}, "row 2 contains no valid image: the file is not a JPEG"),
        (good, ""),
    ):
        table = pa.table({"image": [good, cell], "label": [0, 1]}, features.arrow_schema)
        pa.parquet.write_table(table, file)
        if message:
            with pytest.raises(DataError, match=message):
                load_records(file)
    with pytest.warns(UserWarning, match="converted in .*: 2 images with more than 8 bits"):
        load_records(file)
    described = describe_folder(FolderSettings(str(file), window="2127.5,255"), print)
    described.path.write_text(described.toml)
    loaded = load_records(file, test_folder=file)
    for data in (loaded.train, loaded.test, load_records(file, window="2127.5,255").train):
        assert data.images[1, 0].tolist() == [[0, 40], [80, 255]]
    features = datasets.Features(
        {"x": datasets.Array2D((4, 5), "uint8"), "y": datasets.Value("int8")}
    )
    pixels = np.arange(120, dtype=np.uint8).reshape(6, 4, 5)
    data = datasets.Dataset.from_dict({"x": pixels.tolist(), "y": Y[:6]}, features=features)
    data.to_parquet(tmp_path / "arrays.parquet")
    with pytest.warns(UserWarning, match="features in .*: x; label: y; .*not used: none"):
        images = load_records(tmp_path / "arrays.parquet").train.images
    assert np.array_equal(images[:, 0].numpy(), pixels)


@pytest.mark.parametrize(
    ("files", "tested", "message"),
    [
        ("validation", 0, "only val records, which are used for training"),
        ("test dev", 0, "contains only test and val records, but train records are needed. Save"),
        ("train patient_testimony trainee", 0, "features in"),
        ("Train TEST validation", 1, "the val records .* are not used"),
        ("validation-study/training_0 validation-study/eval_1", 1, "features in"),
    ],
)
def test_splits_are_whole_words(files: str, tested: int, message: str, tmp_path: Path) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        table = pa.table({"x": np.zeros(2, np.uint8), "y": [0, 1]})
        pa.parquet.write_table(table, tmp_path / f"{name}.parquet")
    notes: list[str] = []
    try:
        loaded = read_own_data(FolderSettings(f"hf:{tmp_path}"), notes.append, declaration=None)
        assert (loaded.test is not None) == tested
        assert len(loaded.train) == 2 * (len(files.split()) - tested - ("not used" in message))
    except DataError as error:
        notes = [str(error)]
    assert re.search(message, "\n".join(notes))


def test_hub_file_names_are_not_patterns(tmp_path: Path) -> None:
    for number, name in enumerate(("hub[d]/train-*", "hub[d]/train-1", "hubd/train-1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        table = pa.table({"x": [0.0], "label": [number]})
        pa.parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert parts_of(f"hf:{tmp_path / 'hub[d]'}")["train"].read("label").tolist() == [0, 1]


# --------------------------------------------------------------------------------------- Python


def test_frames_loaders_and_arrays_give_equal_data() -> None:
    names = np.array(["a", "b", "c"])[Y]
    expected = from_arrays(X, names, groups=PATIENTS, domains=SITES, bounds=(-8, 8))
    assert expected.spec.class_names == ("a", "b", "c")
    assert expected.spec.domains == ("north", "south")
    assert torch.equal(expected.domains, torch.from_numpy((SITES == "south").astype(int)))
    frame = pandas.DataFrame(X).assign(label=names, patient=PATIENTS, site=SITES)
    spec = replace(expected.spec, source="a test")
    for data in (
        from_arrays(frame, "label", groups="patient", domains="site", bounds=(-8, 8)),
        from_arrays(torch.tensor(X), torch.tensor(Y), spec, groups=PATIENTS, domains=SITES),
        from_arrays(DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), 7), spec=spec),
    ):
        assert torch.equal(data.images, expected.images)
        assert torch.equal(data.labels, torch.from_numpy(Y))
        assert data.groups is None or torch.equal(data.groups, expected.groups)
    with raises(DataError, "data.invalid"):  # the loader may shuffle
        from_arrays(DataLoader(TensorDataset(torch.tensor(X)), 7), spec=spec, groups=PATIENTS)
    for wrong in ({"labels": "diagnosis"}, {"labels": "label", "domains": ["x"] * N}):
        with pytest.raises(
            DataError, match=r"'diagnosis' is missing|domains .* among north, south"
        ):
            from_arrays(frame[[*range(4), "label"]], spec=spec, **wrong)


def test_private_runs_refuse_derived_specifications() -> None:
    settings = settings_of({"kind": "iid", "clients": 2})
    pairs = TensorDataset(torch.sigmoid(torch.tensor(X)), torch.tensor(Y))
    results = [simulate(settings, data=data, quiet=True) for data in (pairs, (pairs, pairs))]
    assert [result.accuracy is None for result in results] == [True, False]
    secret = replace(settings, privacy=PrivacySettings(epsilon=1.0))
    with raises(DataError, "data.spec"):
        simulate(secret, data=pairs, quiet=True)


def test_test_columns_are_matched_by_name(tmp_path: Path) -> None:
    """Regression: columns were matched by position, so that a swap inverted the results."""
    frame = TABLE.to_pandas()[["f0", "f1", "f2", "label"]]
    frame.to_csv(tmp_path / "train.csv", index=False)
    for name, columns in (
        ("swapped", ["f2", "label", "f0", "f1"]),
        ("more", ["f3", "f2", "f0", "f1", "label"]),
    ):
        TABLE.to_pandas()[columns].to_csv(tmp_path / f"{name}.csv", index=False)
        settings = {"test_folder": str(tmp_path / f"{name}.csv"), "bounds": "-9,9"}
        data = load_records(tmp_path / "train.csv", **settings)
        assert torch.equal(data.test.images, data.train.images)
    frame.rename(columns={"f1": "weight"}).to_csv(tmp_path / "other.csv", index=False)
    for train, test in (("train", "other"), ("other", "train")):
        with raises(DataError, "data.test_features") as caught:
            settings = {"test_folder": str(tmp_path / f"{test}.csv"), "bounds": "-9,9"}
            load_records(tmp_path / f"{train}.csv", **settings)
        assert "f0, " in str(caught.value)
        assert f"{test}.csv" in str(caught.value)
    with raises(DataError, "data.several_columns"):
        from_arrays(pandas.concat([frame, frame[["f0"]]], axis=1), "label", bounds=(-9, 9))


def test_numeric_labels_of_test_records_need_a_stated_order(tmp_path: Path) -> None:
    """Regression: with classes ill and well, the test label 0 was read as ill."""
    for name, labels in {
        "train": ["ill", "well"], "test": ["0", "1"], "grades": ["4", "5"], "typo": ["ill", "wel"]
    }.items():  # fmt: skip
        rows = "".join(f"{number},{labels[number % 2]}\n" for number in range(8))
        (tmp_path / f"{name}.csv").write_text(f"age,label\n{rows}")
    for train, test in (("train", "test"), ("grades", "test"), ("train", "typo")):
        settings = {"test_folder": str(tmp_path / f"{test}.csv"), "bounds": "0,9"}
        with raises(DataError, "data.unknown_class") as caught:
            load_records(tmp_path / f"{train}.csv", **settings)
        assert f"{test}.csv contains the class" in str(caught.value)
    draft = describe_folder(FolderSettings(str(tmp_path / "train.csv"), bounds="0,9"), print)
    draft.path.write_text(draft.toml)
    with raises(DataError, "data.unknown_class"):  # the declaration's order is not the file's
        load_records(tmp_path / "train.csv", test_folder=str(tmp_path / "test.csv"))
    notes: list[str] = []
    spec = load_records(tmp_path / "train.csv").train.spec
    read_as(FolderSettings(str(tmp_path / "test.csv")), spec, notes.append, "test")
    assert any("are class indices, and 0 is ill" in note for note in notes)


def test_csv_files_have_line_breaks_in_quotes_and_no_thousands_separators(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [f'{number % 9},"a long\nnote {number}",{number % 2}' for number in range(90_000)]
    path.write_text("\n".join(["age,note,label", *rows, ""]))  # more than one block of the reader
    assert len(load_records(path, bounds="0,9").train) == 90_000
    for cell in ("1.234,56", "1,234.56", "€ 12.50", "12.50 EUR", "1 234"):
        path.write_text(
            "".join(["age;pay;label\n", *(f'{n};"{cell}";{n % 2}\n' for n in range(4))])
        )
        with raises(DataError, "data.column_values"):
            load_records(path, bounds="0,9")
    path.write_text("age;day;label\n" + "".join(f"{n};01.02.2024;{n % 2}\n" for n in range(4)))
    assert load_records(path, bounds="0,9").train.spec.features == ("age",)


def test_csv_text_and_headings(tmp_path: Path) -> None:
    """Delimiters within quotes are part of a heading, and finite values stay finite."""
    path = tmp_path / "a.csv"
    path.write_text('"a, b, c";label\n1e39;x\n2;y\n')
    records = load_records(path, bounds="0,4")
    assert records.train.images.flatten().tolist() == [1.0, 0.5]
    for content in ("größe,label\n1,x\n".encode("latin-1"), "a,label\n1,x\n".encode("utf-16")):
        path.write_bytes(content)
        with pytest.raises(DataError, match="Save it as CSV UTF-8"):
            load_records(path, bounds="0,4")
    arrays = {"x": X, "x_train": X + 1, "y_train": Y, "y": Y}
    np.savez(tmp_path / "a.npz", **arrays)
    with raises(DataError, "data.two_arrays"):
        load_records(tmp_path / "a.npz", bounds="-9,9")


def test_users_and_records_in_both_splits_are_noted(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    rows = slice(N - 4, N)
    np.savez(tmp_path / "b.npz", x=X[rows], y=Y[rows], patients=[129, 129, 177, 178])
    notes: list[str] = []
    data = {"folder": str(tmp_path / "a.npz"), "test_folder": str(tmp_path / "b.npz")}
    settings = settings_of({"kind": "given"}, data={**data, "bounds": "-8,8"})
    data_of_run(settings, None, None, notes.append, download=False)
    for part in (
        "1 of 3 user names",
        "If they are the same people",
        "4 of 4 test images are identical",
    ):
        assert part in "\n".join(notes)


def test_index_of_pandas_is_no_feature_and_roles_have_one_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scans.csv"
    columns = {"label": Y, "patient": PATIENTS, "site": SITES, "f0": X[:, 0], "f1": X[:, 1]}
    pandas.DataFrame(columns).to_csv(path)  # its first column has no name
    assert load_records(path, bounds="-9,9").train.spec.width == 2
    path.write_text(f"sep=,\n{path.read_text()}")
    assert load_records(path, bounds="-9,9").train.spec.width == 2
    with raises(DataError, "data.column"):
        load_records(path, bounds="-9,9", label_column="label,site")
    wide = {f"e{column}": X[:, 0] for column in range(99)}
    for name, wrong in (("patient_id", "patient"), ("Subject ID", "subject"), ("PersonID", "id")):
        table = {**wide, "remark": ["none"] * N, "label": Y, name: PATIENTS}
        pandas.DataFrame(table).to_csv(path, index=False)
        found = load_records(path, bounds="-9,9").train
        assert (found.spec.width, len(found.groups.unique())) == (99, N // 2)
        with raises(DataError, "data.column"):
            load_records(path, bounds="-9,9", user_column=wrong)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with raises(DataError, "data.package"):
        load_records(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.sample(frac=1, random_state=0),  # stored as __index_level_0__
        lambda frame: frame.set_index(1000 - np.arange(N)).rename_axis("age"),
        lambda frame: frame.sample(frac=1, random_state=0).reset_index(),
        lambda frame: frame.assign(**{"Unnamed: 0": range(N), "rowname": range(N)}),
        lambda frame: frame.assign(StudyID=range(N), image_id=range(N), uid=range(N)),
        lambda frame: frame.assign(label_id=Y, fold=3, is_test=False, site_id=Y),
    ],
)
def test_identifiers_and_other_facts_are_no_features(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Noise has an accuracy of 1 if the position in a sorted file is a feature."""
    frame = pandas.DataFrame({"f0": X[:, 0], "acid": X[:, 1], "label": Y, "patient_id": PATIENTS})
    change(frame).to_parquet(tmp_path / "a.parquet")
    with pytest.warns(match=r": f0, acid; label: label; .*user: patient_id; not used: "):
        loaded = load_records(tmp_path / "a.parquet", bounds="-9,9")
    assert (loaded.train.spec.width, len(loaded.train.groups.unique())) == (2, 30)
