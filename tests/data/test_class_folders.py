"""Tiny-ImageNet and CINIC-10, on files that the test writes in the official layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError

CINIC = dataset_spec("cinic10")
# As in the official list, not in order.
WNIDS = [f"n{10_000_000 + (37 * i) % 200:08}" for i in range(200)]


def write(path: Path, colour: tuple[int, int, int] | int, size: tuple[int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """One training image a class, red = its number in sorted order; class 7's is grey. Ten test
    images, of classes 190 to 199."""
    root = tmp_path / "tiny-imagenet-200"
    for c, name in enumerate(sorted(WNIDS)):
        write(
            root / "train" / name / "images" / f"{name}_0.JPEG",
            77 if c == 7 else (c, 100, 200),
            (64, 64),
        )
        (root / "train" / name / f"{name}_boxes.txt").write_text("none\n")
    lines = []
    for i in range(10):
        write(root / "val" / "images" / f"val_{i}.JPEG", (190 + i, 0, 0), (64, 64))
        lines.append(f"val_{i}.JPEG\t{sorted(WNIDS)[190 + i]}\t0\t32\t44\t62\n")
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (root / "words.txt").write_text("n00001740\tentity\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return tmp_path


def test_tiny_imagenet_numbers_classes_by_sorted_name(tiny: Path) -> None:
    train, test = load_dataset("tiny-imagenet", tiny)
    assert tuple(train.images.shape) == (200, 3, 64, 64)
    assert train.labels.tolist() == list(range(200))
    red = train.images[:, 0].float().mean((1, 2))
    wrong = (red - train.labels).abs() > 3  # JPEG
    assert wrong.nonzero().flatten().tolist() == [7]
    assert train.images[7].unique().tolist() == [77]  # grey, in three equal channels
    assert test.labels.tolist() == list(range(190, 200))
    assert (test.images[:, 0].float().mean((1, 2)) - test.labels).abs().max() < 3
    assert (train.spec.train_size, train.spec.test_size) == (100_000, 10_000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n".join(WNIDS[1:]), "must list 200 WordNet numbers .*: it has 199 lines, 199 different"),
        ("\n".join([*WNIDS[1:], WNIDS[5]]), "it has 200 lines, 199 different"),
        ("<html>404</html>", "'<html>404</html>' is none"),
    ],
)
def test_a_list_of_classes_that_is_none(tiny: Path, content: str, message: str) -> None:
    (tiny / "tiny-imagenet-200" / "wnids.txt").write_text(content)
    with pytest.raises(DataFilesCorruptError, match=rf"wnids.txt.*{message}") as error:
        load_dataset("tiny-imagenet", tiny)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "val_0.JPEG",
        "val_0.JPEG\tn99999999\t0",
        "../x.JPEG\tn10000001\t0",
        "\tn10000001\t0",
    ],
)
def test_annotations_that_are_none(tiny: Path, line: str) -> None:
    path = tiny / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    path.write_text(f"val_1.JPEG\tn10000001\t0\n\n{line}\n")
    with pytest.raises(
        DataFilesCorruptError, match=r"val_annotations.txt, line 3: expected FILE, tab"
    ):
        load_dataset("tiny-imagenet", tiny)
    path.write_text("\n")
    with pytest.raises(DataFilesCorruptError, match=r"val_annotations.txt lists no image"):
        load_dataset("tiny-imagenet", tiny)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataFilesCorruptError, match=r"val_annotations.txt is not a text file"):
        load_dataset("tiny-imagenet", tiny)


def test_tiny_imagenet_lacks_images(tiny: Path) -> None:
    image = tiny / "tiny-imagenet-200" / "val" / "images" / "val_3.JPEG"
    write(image, (0, 0, 0), (32, 48))
    with pytest.raises(
        DataFilesCorruptError, match=r"val_3.JPEG is 32×48, images of tiny-imagenet"
    ):
        load_dataset("tiny-imagenet", tiny)
    image.write_bytes(b"<html>404</html>")
    with pytest.raises(DataFilesCorruptError, match=r"val_3.JPEG cannot be read as an image"):
        load_dataset("tiny-imagenet", tiny)
    image.unlink()
    with pytest.raises(DataFilesMissingError, match=r"val_3.JPEG is listed but not there"):
        load_dataset("tiny-imagenet", tiny)
    lacking = sorted(WNIDS)[50]
    (tiny / "tiny-imagenet-200" / "train" / lacking / "images" / f"{lacking}_0.JPEG").unlink()
    with pytest.raises(
        DataFilesMissingError, match=rf"no image in .*{lacking}/images; unpack http://cs231n"
    ):
        load_dataset("tiny-imagenet", tiny)


@pytest.fixture
def cinic(tmp_path: Path) -> Path:
    """Three images a class and split; red tells the class, green the split, blue the place in the
    order of names."""
    for s, split in enumerate(("train", "valid", "test")):
        for c, name in enumerate(CINIC.class_names):
            for i, file in enumerate(("cifar10-test-7", "cifar10-train-44", "n02687172_9")):
                write(
                    tmp_path / "CINIC-10" / split / name / f"{file}.png",
                    (20 * c, 50 * s, i),
                    (32, 32),
                )
    return tmp_path


def test_cinic10_trains_on_train_and_tests_on_test(cinic: Path) -> None:
    for split, green in zip(load_dataset("cinic10", cinic), (0, 100), strict=True):
        assert tuple(split.images.shape) == (30, 3, 32, 32)
        assert split.labels.tolist() == [c for c in range(10) for _ in range(3)]
        assert torch.equal(split.images[:, 0, 5, 6].long(), 20 * split.labels)
        # nothing of `valid`, which would be 50
        assert split.images[:, 1].unique().tolist() == [green]
        assert split.images[:, 2, 0, 0].tolist() == [0, 1, 2] * 10
    assert (CINIC.train_size, CINIC.test_size) == (90_000, 90_000)
