"""Tests that a private node's answers do not depend on its records: their number, labels and
pixels, and errors of custom code on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsynth import DatasetSpec, ImageData, register_model, resolve
from fedsynth.deployment import networked_run as served
from fedsynth.deployment import node
from fedsynth.deployment.frames import Connection, Frame, Timeouts
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.node import ClassFolders, Node, Source
from fedsynth.deployment.policy import Owner, Policy
from fedsynth.deployment.proposal import Proposal
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import register_features
from tests.deployment.local_setup import Link, noise_of
from tests.image_folders import write_image

SPEC = DatasetSpec(
    "scans", 1, 8, 8, 3, 60, 1, (0.5,), (0.25,), ("a", "b", "c"), "our clinic", groups=30
)
RUN = "0123456789abcdef"
RAISES, DROPS, INFINITE = 255, 254, 253
"""Grey values of images on which the custom code fails."""
CLEAN = (9, 80, *range(100, 116))
HOSTILE = (*CLEAN, RAISES, DROPS, INFINITE, RAISES)
RECORDS = {"none": (), "one": (7,), "a pass": tuple(range(64)), "clean": CLEAN, "hostile": HOSTILE}


def images(pixels: tuple[int, ...]) -> ImageData:
    """Returns an image of each grey value, two per user."""
    grey_images = torch.tensor(pixels, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, 8, 8)
    labels = torch.full((len(grey_images),), 2)
    groups = torch.arange(len(grey_images)) // 2
    return ImageData(grey_images, labels, SPEC, groups=groups, may_be_empty=True)


@dataclass(frozen=True)
class FixedSource:
    """A source of fixed records."""

    data: ImageData

    def read(self, proposal: Proposal, number: int) -> ImageData:
        return self.data

    def objections(self, proposal: Proposal, declared: bool) -> list[str]:
        return []

    def identifier(self, proposal: Proposal) -> str:
        return "scans"


def misbehaving(x: Tensor, values: Tensor) -> Tensor:
    """Returns the values of pixels in [0, 1], unless an image is black (as padding is) or
    hostile."""
    darkest = x.amin(dim=(1, 2, 3))
    uniform = darkest == x.amax(dim=(1, 2, 3))
    grey = torch.where(uniform, (255 * darkest).round(), -1)
    if bool(((grey == RAISES) | (grey == 0)).any()):  # an assertion would describe the tensor
        raise ValueError("a hostile image")
    values = torch.where((grey == INFINITE)[:, None], torch.inf, values)
    return values[grey != DROPS]


def hostile_map(shape: tuple[int, int, int]) -> FeatureMap:
    def function(x: Tensor) -> Tensor:
        return misbehaving(x, x.flatten(1)[:, :16])

    return FeatureMap("hostile", shape, 16, 4.0, 2.0, "pixels", function)


class HostileModel(nn.Module):
    """A model that fails on hostile images."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.classifier = nn.Linear(8, classes)

    def embed(self, x: Tensor) -> Tensor:
        return misbehaving(x / 4 + 0.5, torch.relu(self.first(x.flatten(1))))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x))
        return logits


@pytest.fixture(autouse=True)
def register_hostile_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the hostile code; other tests cover its trial on public images."""
    torch.set_num_threads(1)
    register_features("hostile", hostile_map)
    register_model("hostile", HostileModel)
    for module in (node, served):
        monkeypatch.setattr(module, "check_private_steps", lambda *args: [])


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
            **more.get("privacy", {}),
        },
    }


def answers(folder: Path, settings: Any, records: Source) -> tuple[list[Any], list[bytes], str]:
    """Returns the kind, facts and length of each answer of the first of two nodes, the payloads,
    and its owner's messages; with repeatable noise."""
    messages: list[str] = []
    owner = Owner(Policy(classes=SPEC.class_names, height=8, width=8, channels=1))
    nodes = {}
    for k, source in enumerate((records, FixedSource(images(CLEAN)))):
        more: Any = {"say": messages.append} if k == 0 else {}
        node_folder = folder / str(k)
        nodes[100 + k] = Node(
            k, node_folder, source, owner, device="cpu", secret=noise_of(k), **more
        )
    proposal = Proposal(RUN, resolve(settings, own_data="scans"), SPEC)
    link = Link(nodes)
    connection = Connection(link, Timeouts(join=0.2, answer=60, poll=0.05))
    NetworkedRun(proposal, connection, folder / "runs").run()
    seen: list[Any] = []
    payloads: list[bytes] = []
    # "features" sends the classes whose released counts are above a floor
    fixed_size = settings["privacy"].get("mechanism") != "features"
    for answer in (answer for number, _, answer in link.seen if number == 100):
        frame = Frame.from_bytes(answer)
        facts = {key: value for key, value in frame.facts.items() if key != "history"}
        sized = fixed_size or frame.kind != "answer"
        seen.append((frame.kind, facts, len(answer) if sized else 0))
        payloads.append(frame.payload)
    return seen, payloads, "\n".join(messages)


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
        source = FixedSource(images(pixels))
        seen[name], payloads[name], log = answers(tmp_path / name, settings, source)
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
    """Adds a file of each invalid kind."""
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
