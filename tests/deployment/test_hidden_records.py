"""Tests that a private node's answers do not depend on its records: their number, labels and
pixels, and errors of custom code on them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedsynth import DatasetSpec, ImageData, register_model, resolve
from fedsynth.data.declaration import FolderSettings
from fedsynth.data.describe import describe_folder
from fedsynth.deployment import node
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.node import ClassFolders
from fedsynth.deployment.policy import Policy
from fedsynth.deployment.proposal import Proposal, new_run
from fedsynth.errors import DataError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import register_features
from fedsynth.federation.position_leak_check import StepCheck
from fedsynth.models.small import Mlp
from fedsynth.results import active_run
from tests.deployment.local_setup import Setup, join, noise_of
from tests.raising import raises
from tests.user_files import write_image

SPEC = DatasetSpec(
    "scans", 1, 8, 8, 3, 60, 1, (0.5,), (0.25,), ("a", "b", "c"), "our clinic", groups=30
)
RUN = "0123456789abcdef"
# Grey values of images on which the custom code fails.
RAISES, DROPS, INFINITE = 255, 254, 253

CLEAN = (9, 80, *range(100, 116))
HOSTILE = (*CLEAN, RAISES, DROPS, INFINITE, RAISES)
RECORDS = {"none": (), "one": (7,), "a pass": tuple(range(64)), "clean": CLEAN, "hostile": HOSTILE}


def source(pixels: tuple[int, ...]) -> Any:
    """Returns a source of an image of each grey value, two per user."""
    grey_images = torch.tensor(pixels, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, 8, 8)
    labels = torch.full((len(grey_images),), 2)
    groups = torch.arange(len(grey_images)) // 2
    data = ImageData(grey_images, labels, SPEC, groups=groups, may_be_empty=True)
    return SimpleNamespace(
        read=lambda *_: data, objections=lambda *_: [], identifier=lambda _: "scans"
    )


def misbehaving(x: Tensor, values: Tensor) -> Tensor:
    """Returns the values of pixels in [0, 1], unless an image is black, as padding, or hostile."""
    darkest = x.amin(dim=(1, 2, 3))
    uniform = darkest == x.amax(dim=(1, 2, 3))
    grey = torch.where(uniform, (255 * darkest).round(), -1)
    if bool(((grey == RAISES) | (grey == 0)).any()):  # an assertion would describe the tensor
        raise ValueError("a hostile image")
    values = torch.where((grey == INFINITE)[:, None], torch.inf, values)
    return values[grey != DROPS]


def hostile_map(shape: tuple[int, int, int]) -> FeatureMap:
    return FeatureMap(
        "hostile", shape, 16, 4.0, 2.0, "pixels", lambda x: misbehaving(x, x.flatten(1)[:, :16])
    )


class HostileModel(Mlp):
    dense = False

    def embed(self, x: Tensor) -> Tensor:
        return misbehaving(x / 4 + 0.5, super().embed(x))


@pytest.fixture(autouse=True)
def register_hostile_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the hostile code; other tests cover its trial on public images."""
    register_features("hostile", hostile_map)
    register_model("hostile", lambda shape, classes: HostileModel(shape, classes, 8))
    for module in (active_run, node):
        monkeypatch.setattr(module, "check_private_steps", lambda *args: StepCheck())


STEPS: dict[str, dict[str, Any]] = {
    "feddm": {"iterations": 2, "ipc": 1, "server_epochs": 1},
    "fedavg": {"local_steps": 2},
    "fedstats": {"features": "hostile"},
}


def sections(method: str, **more: Any) -> dict[str, dict[str, Any]]:
    model = {} if method == "fedstats" else {"name": "hostile"}
    return {
        "run": {"method": method, "rounds": 1, "device": "cpu", "quorum": 0.1},
        "partition": {"clients": 2, **more.get("partition", {})},
        "model": more.get("model", model),
        "method": STEPS[method],
        "privacy": {
            "noise_multiplier": 5.0,
            "nominal_size": 30,
            **({} if method == "fedstats" else {"sample_rate": 1.0}),
            "unit": "record",
            **more.get("privacy", {}),
        },
    }


def answers(folder: Path, settings: Any, records: Any) -> tuple[list[Any], list[bytes], str]:
    """Returns the kind, facts and length of each answer of the first of two nodes, the payloads,
    and the owners' messages; with repeatable noise."""
    setup = Setup(folder)
    policy = Policy(classes=SPEC.class_names, height=8, width=8, channels=1)
    sources = enumerate((records, source(CLEAN)))
    link = setup.link(*(setup.node(k, policy, source=s, secret=noise_of(k)) for k, s in sources))
    served = setup.serve(Proposal(RUN, resolve(settings, own_data="scans"), SPEC), link)
    assert '"seconds"' not in (served.folder.path / "metrics.jsonl").read_text()
    seen: list[Any] = []
    payloads: list[bytes] = []
    # "features" sends the classes whose released counts are above a floor
    fixed_size = settings["privacy"].get("mechanism") != "features"
    for answer in (answer for number, _, answer in link.seen if number == 100):
        assert str(folder).encode() not in answer
        frame = Frame.from_bytes(answer)
        facts = {key: value for key, value in frame.facts.items() if key != "history"}
        sized = fixed_size or frame.kind != "answer"
        seen.append((frame.kind, facts, len(answer) if sized else 0))
        payloads.append(frame.payload)
    return seen, payloads, "\n".join(setup.messages)


@pytest.mark.parametrize(
    "settings",
    [
        sections("feddm", partition={"local_test": 0.3}),
        sections("feddm", privacy={"mechanism": "features"}),
        sections("fedavg", privacy={"unit": "user", "user_records": 1}),
        sections("fedstats"),
        sections("fedavg", model={"name": "linear", "features": "hostile"}),
    ],
    ids=["residual", "features", "users", "statistics", "on features"],
)
def test_answers_do_not_depend_on_records(tmp_path: Path, settings: Any) -> None:
    """Kind, length and text are equal. Records on which the code fails contribute zero: the same
    bits are released as without them."""
    seen, payloads = {}, {}
    for name, pixels in RECORDS.items():
        seen[name], payloads[name], log = answers(tmp_path / name, settings, source(pixels))
    assert "could not be computed: ValueError" in log
    assert {kind for kind, _, _ in seen["clean"]} == {"answer"}
    for name, node_answers in seen.items():
        assert node_answers == seen["clean"], name
    if settings["privacy"].get("mechanism") != "features":  # which also releases counts
        assert payloads["hostile"] == payloads["clean"]
        assert payloads["one"] != payloads["clean"]


def scans(folder: Path) -> Path:
    """Writes an owner's images of two of the three classes, and their users."""
    rows = ["path,user"]
    for k in range(12):
        path = f"{'ab'[k % 2]}/{k:02}.png"
        write_image(folder / path, k, (8, 8))
        rows.append(f"{path},patient {k // 3}")
    (folder / "users.csv").write_text("\n".join(rows))
    return folder


def add_invalid_files(folder: Path) -> None:
    for name, content in (("w.png", b"no image"), ("x.jpg", b"\xff\xd8\xff"), ("x.dcm", b"DICM")):
        (folder / "a" / name).write_bytes(content)
    (folder / "a" / "y.png").touch()
    (folder / "a" / "z.png").symlink_to(folder / "nothing")
    for name in ("x.png", "a/deeper/and/x.png", "flu/x.png", "A/x.png"):
        write_image(folder / name, 0, (8, 8))


def add_manifest(folder: Path) -> None:
    """Adds a manifest with a missing file and a file of an unknown class."""
    paths = [f"{label}/{k:02}.png" for label in "ab" for k in range(12)]
    rows = [f"{path},{path[0]}" for path in paths if (folder / path).exists()]
    rows += ["a/missing.png,a", "a/00.png.png,flu"]
    (folder / "manifest.csv").write_text("\n".join(["path,label", *rows]))


@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize("listing", [False, True])
def test_invalid_files_change_no_answer(tmp_path: Path, unit: str, listing: bool) -> None:
    """A folder of only invalid files gives the same answers, too."""
    settings = sections("feddm", privacy={"unit": unit})
    expected = answers(tmp_path / "sound", settings, ClassFolders(scans(tmp_path / "data")))
    assert {kind for kind, _, _ in expected[0]} == {"answer"}
    folder = scans(tmp_path / "spoiled")
    add_invalid_files(folder)
    if listing:
        add_manifest(folder)
    seen, sent, _ = answers(tmp_path / "1", settings, ClassFolders(folder))
    assert (seen, sent) == expected[:2]
    empty = tmp_path / "empty"
    (empty / "a").mkdir(parents=True)
    if listing:
        (empty / "a" / "x.png").write_bytes(b"no image")
    assert answers(tmp_path / "none", settings, ClassFolders(empty))[0] == expected[0]


# ------------------------------------------------------------------- the owner's class folders


def scan_proposal(private: bool = True, **spec: Any) -> Proposal:
    """Returns a run on images of two classes; `spec` changes their specification."""
    settings = replace(resolve(sections("feddm"), own_data="scans"), device="auto")
    settings = settings if private else replace(settings, privacy=None)
    return Proposal(
        new_run(), settings, replace(SPEC, **{"classes": 2, "class_names": ("a", "b")} | spec)
    )


def test_owner_images_are_read_by_class(tmp_path: Path) -> None:
    folder = scans(tmp_path / "data")
    proposal = scan_proposal(private=False)
    data = ClassFolders(folder).read(proposal, 0)
    assert data.labels.tolist() == [0] * 6 + [1] * 6
    np.testing.assert_array_equal(data.images[6, 0], Image.open(folder / "b" / "01.png"))
    assert Proposal.from_json(json.loads(json.dumps(proposal.to_json()))) == proposal
    with raises(DataError, "data.unknown_class"):
        ClassFolders(folder).read(scan_proposal(False, class_names=("a", "flu")), 0)
    with raises(DataError, "data.missing"):
        ClassFolders(tmp_path / "nothing").read(proposal, 0)


def test_class_names_cannot_leave_the_owners_folder(tmp_path: Path) -> None:
    """Images exist at each path that such a name could reach."""
    data_folder = tmp_path / "data" / "own"
    for target in (data_folder.parent, data_folder / "a", tmp_path / "secret"):
        write_image(target / "a.png", 0, (8, 8))
    (data_folder.parent / "link").symlink_to(tmp_path / "secret")
    for name in ("nobody", "..", ".", "../../secret", "../link", "a/..", "ä" * 200):
        data = ClassFolders(data_folder).read(scan_proposal(False, class_names=("a", name)), 0)
        assert data.labels.tolist() == [0]


DECLARED = Policy(classes=("a", "b"), height=8, width=8, channels=1)


@pytest.mark.parametrize("declared", [False, True])
def test_owner_declarations_decide_whether_images_fit(setup: Setup, declared: bool) -> None:
    """The declaration decides even if images of the requested classes exist."""
    folder = scans(setup.folder / "data")
    policy = Policy() if declared else DECLARED
    if declared:
        text = describe_folder(FolderSettings(str(folder)), print).toml
        text = text.replace('by = ""', 'by = "A"').replace('date = ""', 'date = "2026-01-01"')
        (folder / "fedsynth.toml").write_text(text)

    def answer(policy: Policy | None, **spec: Any) -> Frame:
        node = setup.node(0, policy, home=f"home-{next(homes)}", source=ClassFolders(folder))
        return join(node, scan_proposal(**spec))

    homes = itertools.count()
    assert answer(policy).kind == "answer"
    (folder / "flu").mkdir()
    names = ({"class_names": ("b", "a")}, {"class_names": ("a", "flu")})
    shown = ({"window": (40.0, 400.0)}, {"slice": 1}) if declared else ()
    for spec in ({"height": 16}, {"width": 16}, *names, *shown):
        reply = answer(policy, **spec)
        assert reply.kind == "refusal"
        assert "owner" in reply.facts["reason"]
    assert declared or "has not declared the classes" in answer(None).facts["reason"]


def test_unreadable_data_give_one_answer(setup: Setup) -> None:
    (scans(setup.folder / "list") / "manifest.csv").write_bytes(b"path,label\n\xff\xfe")
    (scans(setup.folder / "link") / "again").symlink_to(setup.folder / "link" / "a")
    answers = set()
    for name in ("missing", "list", "link"):
        folder = setup.folder / name
        node = setup.node(0, DECLARED, home=f"home-{name}", source=ClassFolders(folder))
        answers.add(join(node, scan_proposal()).to_bytes())
        assert str(folder) in setup.messages[-1]
    assert len(answers) == 1
    assert b"cannot take part" in answers.pop()
