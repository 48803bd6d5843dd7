"""Segmentation: masks as labels, the loss and Dice against NumPy, runs on sites, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import special
from torch import nn

import fedsynth as fs
from fedsynth.data.folders import find_files
from fedsynth.data.images import record_digests
from fedsynth.data.masks import Pair, examples_in, read_masked_folder, read_prostate_mri
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import (
    DataError,
    DataFilesCorruptError,
    ForbiddenLayerError,
    PartitionError,
    SettingError,
)
from fedsynth.evaluation.accuracy import predict
from fedsynth.experiments.page import runs_page
from fedsynth.methods import METHODS, method_class
from fedsynth.models.unet import UNet
from fedsynth.results.finished import Run
from fedsynth.simulation.audit import audit_run
from fedsynth.training import segmentation
from tests.quick_runs import folder_of, read_rows
from tests.raising import raises

RNG = np.random.default_rng(0)


def dice_of(predicted: Any, mask: Any, classes: int) -> float:
    values = []
    for c in range(classes):
        a, b = predicted == c, mask == c
        total = a.sum() + b.sum()
        values.append(2 * (a & b).sum() / total if total else 1.0)
    return float(np.mean(values))


def test_loss_and_dice_equal_numpy() -> None:
    logits, masks = RNG.normal(size=(4, 3, 5, 6)), RNG.integers(0, 2, (4, 5, 6))
    logits[0, 2] = -99  # class 2 is neither in this prediction nor in this mask
    p, truth = special.softmax(logits, axis=1), np.eye(3)[masks].transpose(0, 3, 1, 2)
    losses = []
    for q, t in zip(p, truth, strict=True):
        both, total = (q * t).sum(axis=(1, 2)), (q + t).sum(axis=(1, 2))
        dice = (2 * both + 1e-5) / (total + 1e-5)
        losses.append(0.5 * (-(t * np.log(q)).sum(axis=0).mean() + 1 - dice.mean()))
    x, y = torch.from_numpy(logits), torch.from_numpy(masks.astype(np.uint8))
    np.testing.assert_allclose(segmentation.losses(x, y), losses)
    expected = [dice_of(z.argmax(axis=0), m, 3) for z, m in zip(logits, masks, strict=True)]
    np.testing.assert_allclose(segmentation.dice(x, y), expected)


def test_masks_are_checked_and_belong_to_records() -> None:
    images, masks = RNG.integers(0, 256, (3, 8, 8)).astype(np.uint8), RNG.integers(0, 3, (3, 8, 8))
    data = fs.from_arrays(images, masks)
    assert (data.spec.classes, data.labels.dtype) == (3, torch.uint8)
    assert data.class_counts().tolist() == np.bincount(masks.ravel(), minlength=3).tolist()
    other = fs.from_arrays(images, np.roll(masks, 1, axis=2), data.spec)
    for labels, equal in ((True, False), (False, True)):
        a, b = (record_digests(d, np.arange(3), b"", labels=labels) for d in (data, other))
        assert (a == b).all() == equal
    for wrong, code in ((masks[:, 1:], "data.label_shape"), (masks + 1, "data.label_range")):
        with raises(DataError, code):
            fs.from_arrays(images, wrong, data.spec)


def settings(method: str, /, **more: dict[str, Any]) -> Any:
    sections: dict[str, dict[str, Any]] = {
        "run": {"method": method, "rounds": 1, "device": "cpu"},
        "data": {"dataset": "shapes"},
        "model": {"width": 2},
        "partition": {"local_test": 0.3},
    }
    return fs.resolve(
        {key: {**sections.get(key, {}), **more.get(key, {})} for key in {*sections, *more}}
    )


RUN_ON_MASKS = (
    "fedavg",
    "fedprox",
    "fedbn",
    "fedfa-plus",
    "fedharmo",
    "fedsam",
    "feddc",
    "fedmgda-plus",
)


@pytest.mark.parametrize("method", RUN_ON_MASKS)
def test_runs_measure_dice_by_site_and_client(method: str, tmp_path: Path) -> None:
    result = fs.simulate(settings(method), output=tmp_path, quiet=True)
    (row,) = read_rows(folder_of(result))
    _, test = fs.load_dataset("shapes")
    predicted = predict(result.model, test).argmax(dim=1).numpy()
    scores = [dice_of(p, m, 2) for p, m in zip(predicted, test.labels.numpy(), strict=True)]
    name = "common_model_dice" if method == "fedbn" else "test_dice"
    assert row[name] == result.summary[name] == result.accuracy == pytest.approx(np.mean(scores))
    assert not [key for key in (*row, *result.summary) if "accuracy" in key or "auroc" in key]
    assert len(row["local"]["client_dice"]) == 4
    if method == "fedbn":
        return
    by_site = np.reshape(scores, (4, -1)).mean(axis=1)
    np.testing.assert_allclose(list(row["domain_dice"].values()), by_site)
    assert row["domain_average"] == pytest.approx(by_site.mean())
    assert f"{100 * by_site[0]:.2f} %" in runs_page([Run.read(folder_of(result))])


def test_private_run_on_masks_has_been_tried() -> None:
    """A broken trial draws classes in place of masks, and the report has a warning."""
    sections = {"model": {"norm": "group", "width": 2}, "method": {"local_steps": 1}}
    run = settings("fedavg", privacy={"epsilon": 8.0, "nominal_size": 20}, **sections)
    audit = audit_run(run, canaries=10, test_only=np.random.default_rng(0))
    assert audit.epsilon_lower_bound <= audit.epsilon <= 8.0
    result = fs.simulate(run, quiet=True)
    assert result.privacy is not None
    assert result.privacy["verdict"]["formal"]
    assert not [text for text in result.privacy["verdict"]["warnings"] if "could not run" in text]


def test_what_needs_classes_is_refused() -> None:
    refused = [name for name in METHODS if method_class(name).masks_refusal]
    needed = {"feddm", "fedaf", "fedfm", "fedgen", "moon", "fedkf", "fedhydra", "fpl", "fedsr"}
    assert needed | {"fedmix", "fedrobust", "ccvr", "fedbe", "fedcvae-kd"} <= set(refused)
    assert not set(RUN_ON_MASKS) & set(refused)
    for name in refused:
        proxy = {"method": {"proxy": "noise"}} if name in ("feddf", "fedbe") else {}
        with raises(SettingError, "run.method"):
            fs.simulate(settings(name, **proxy), quiet=True)
    for changes, kind, code in (
        ({"partition": {"kind": "dirichlet"}}, PartitionError, "partition.masks"),
        ({"model": {"name": "convnet"}}, SettingError, "model.name"),
        ({"model": {"projection": 4}}, SettingError, "model.name"),
        ({"data": {"dataset": "digits"}, "model": {"name": "unet"}}, SettingError, "model.name"),
        ({"privacy": {"epsilon": 8.0}}, ForbiddenLayerError, "model.mixes_examples"),
    ):
        with raises(kind, code):
            fs.simulate(settings("fedavg", **changes), quiet=True)


def save(file: Path, values: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".png":
        Image.fromarray(np.asarray(values, np.uint8)).save(file)
    else:
        nibabel.save(nibabel.Nifti1Image(np.asarray(values), np.eye(4)), file)


def write_sites(root: Path, value: int = 255) -> Any:
    """Two sites of four images each, whose masks have the values 0 and `value`."""
    masks = RNG.integers(0, 2, (2, 4, 16, 16))
    for site, name in enumerate(("nord", "süd")):
        for k in range(4):
            save(root / name / "images" / f"{k}.png", RNG.integers(0, 256, (16, 16)))
            save(root / name / "masks" / f"{k}.png", value * masks[site, k])
    return masks


def test_sites_of_a_folder_are_clients(tmp_path: Path) -> None:
    masks = write_sites(tmp_path / "data")
    result = fs.simulate(
        fs.resolve(
            {
                "run": {"method": "fedavg", "rounds": 1, "device": "cpu"},
                "data": {"folder": str(tmp_path / "data")},
                "model": {"name": "unet", "width": 2},
                "method": {"local_epochs": 1},
            }
        ),
        quiet=True,
    )
    assert len(result.uploads) == 2
    assert (
        fs.load_records(tmp_path / "data").train.labels.numpy() == masks.reshape(8, 16, 16)
    ).all()
    masks = write_sites(tmp_path / "data", value=2)
    data = fs.load_records(tmp_path / "data", image_size=32)
    assert (data.train.spec.image_shape, data.train.spec.classes) == ((1, 32, 32), 3)
    enlarged = 2 * masks.reshape(8, 16, 16).repeat(2, axis=1).repeat(2, axis=2)
    assert (data.train.labels.numpy() == enlarged).all()  # classes, not blends of neighbours


@pytest.mark.parametrize(
    ("file", "values", "code"),
    [
        ("masks/1.png", np.full((16, 16), 7), "data.mask_value"),
        ("masks/1.png", np.zeros((16, 15)), "data.mask_size"),
        ("masks/1.png", np.zeros((16, 16, 3)), "data.mask_size"),
        ("masks/9.png", np.zeros((16, 16)), "data.mask_pairs"),
        ("images/1.bmp", b"", "data.mask_pairs"),
        ("images/1.png", b"no image", "data.unreadable_images"),
    ],
)
def test_unusable_masks_are_refused(file: str, values: Any, code: str, tmp_path: Path) -> None:
    write_sites(tmp_path)
    train = fs.load_records(tmp_path)
    if isinstance(values, bytes):
        (tmp_path / "nord" / file).write_bytes(values)
    else:
        save(tmp_path / "nord" / file, values)
    with raises(DataFilesCorruptError, code) as caught:
        fs.load_records(tmp_path)
        read_masked_folder(
            fs.FolderSettings(str(tmp_path)), str(tmp_path), "", print, train.train.spec
        )
    assert "nord" in str(caught.value)


def test_masks_are_turned_and_windows_apply(tmp_path: Path) -> None:
    """Regression: EXIF turned the image only, and the window had no effect."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for site in ("nord", "süd"):
        mask = np.zeros((16, 16), np.uint8)
        mask[:4] = 255
        for kind, values in (("images", mask.astype(np.uint16) * 4), ("masks", mask)):
            (tmp_path / site / kind).mkdir(parents=True)
            Image.fromarray(values).save(tmp_path / site / kind / "1.png", exif=exif)
    data = fs.load_records(tmp_path, window="510,1020").train
    assert set(data.images.flatten().tolist()) == {0, 255}
    assert np.array_equal(data.images[:, 0].numpy() == 255, data.labels.numpy() == 1)
    assert bool((data.labels[0, :, -4:] == 1).all())
    for key in ("skip_corrupt", "skip_other"):
        with raises(SettingError, f"data.{key}"):
            fs.load_records(tmp_path, **{key: True})
    save(tmp_path / "nord" / "masks" / "1.png", (mask.T > 0) * 1)
    with raises(DataFilesCorruptError, "data.mask_value"):
        fs.load_records(tmp_path)


def test_sites_and_volumes_without_usable_masks_are_refused(tmp_path: Path) -> None:
    """Regression: a site with a misspelt folder was left out silently."""
    write_sites(tmp_path)
    (tmp_path / "süd" / "masks").rename(tmp_path / "süd" / "mask")
    (tmp_path / "fedsynth-ledger").mkdir()
    (tmp_path / "nord" / "images" / "Thumbs.db").touch()
    with raises(DataFilesCorruptError, "data.mask_folders") as caught:
        fs.load_records(tmp_path)
    assert "süd" in str(caught.value)
    shutil.rmtree(tmp_path / "süd")
    (tmp_path / "nord" / "images" / "2.gif").write_bytes(b"GIF89a")
    with raises(DataFilesCorruptError, "data.other_files"):
        fs.load_records(tmp_path)
    root = tmp_path / "volumes"
    volume = RNG.random((16, 16, 5))
    save(root / "nord" / "images" / "a.nii", volume)
    save(root / "nord" / "masks" / "a.nii", np.zeros((16, 16, 5)))
    with raises(DataError, "data.mask_slices"):
        fs.load_records(root)
    mask = nibabel.Nifti1Image(1.0 * (volume > 0.5), np.diag([2.0, 2.0, 2.0, 1.0]))
    nibabel.save(mask, root / "nord" / "masks" / "a.nii")
    with raises(DataFilesCorruptError, "data.mask_space"):
        fs.load_records(root)


def test_folders_with_masks_cannot_be_described(tmp_path: Path) -> None:
    write_sites(tmp_path)
    with raises(DataError, "data.masks"):
        find_files(tmp_path)


@pytest.mark.parametrize("release", [True, False])
def test_prostate_mri_has_three_slices_and_known_splits(release: bool, tmp_path: Path) -> None:
    spec = fs.DatasetSpec(**{
        **vars(dataset_spec("prostate-mri")), "height": 16, "width": 16, "domains": ("BIDMC", "HK"),
    })  # fmt: skip
    volume = np.arange(52)[None, None] + np.zeros((16, 16, 1))  # slice i has the value i
    mask = np.zeros((16, 16, 52))
    mask[3, 5] = 1 + release  # also in the first and the last slice, which lack a neighbour
    for site in spec.domains:
        folder = tmp_path / "prostate-mri" / site
        names = ("Case00.nii.gz", "Case00_Segmentation.nii.gz")
        if not release:
            names = ("images/a.nii.gz", "masks/a.nii.gz")
        save(folder / names[0], volume)
        save(folder / names[1], mask)
    assert len(list(examples_in(Pair(*(folder / name for name in names))))) == 50
    train, test = read_prostate_mri(spec, tmp_path)
    assert np.bincount(train.domains).tolist() == [32, 32]  # of 50 slices, at least 32
    assert np.bincount(test.domains).tolist() == [10, 10]
    # axial slices: columns run from right to left, rows from front to back
    assert (train.labels[:, 15 - 5, 15 - 3] == 1).all()
    assert (train.labels.sum(axis=(1, 2)) == 1).all()
    levels = np.minimum(train.images[:, :, 0, 0].astype(int) * np.quantile(volume, 0.99) / 255, 51)
    np.testing.assert_allclose(np.diff(levels[levels[:, 2] < 50], axis=1), 1, atol=0.25)
    with raises(DataFilesCorruptError, "data.mask_size"):
        save(tmp_path / "prostate-mri" / "HK" / names[1], mask[:, :, 1:])
        read_prostate_mri(spec, tmp_path)


def test_unet_joins_each_level_with_its_encoder(device: torch.device) -> None:
    x = torch.randn(2, 1, 32, 48, generator=torch.Generator().manual_seed(0)).to(device)
    for level in range(1, 5):
        net = UNet((1, 32, 48), 3, width=2).to(device)
        logits = net(x)
        assert logits.shape == (2, 3, 32, 48)
        nn.init.zeros_(net.get_submodule(f"up{level}").weight)  # cuts off all that is below
        logits = net(x)
        nn.init.zeros_(net.bottleneck[0].weight)
        assert torch.equal(net(x), logits)
        nn.init.zeros_(net.get_submodule(f"encoder{level}.0").weight)
        assert not torch.allclose(net(x), logits)
