"""Proposes a declaration for images or records, which a person then checks and signs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedsynth.data.declaration import FolderSettings, default_declaration, default_name
from fedsynth.data.files import LEDGERS
from fedsynth.data.images import ImageData
from fedsynth.data.medical import window_text
from fedsynth.data.own_data import as_data, spec_of, splits_of, training_records
from fedsynth.data.partition import count_matrix
from fedsynth.data.picture import partition_table
from fedsynth.data.records import by_site, site_names
from fedsynth.privacy.releases import USER
from fedsynth.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class Described:
    """The result of `describe_folder`: a proposed declaration for a folder of images.

    Attributes:
        toml: the text of the declaration.
        table: a private table with exact image counts for each (site, class) pair.
        path: the file in which runs expect the declaration.
        options: the command-line options for a private run on the described images.
        by_site: True if the sites can be the clients of a federation.
    """

    toml: str
    table: str
    path: Path
    options: tuple[str, ...]
    by_site: bool

    def commands(self, declaration: Path) -> list[str]:
        """Returns commands for private runs with the signed declaration.

        The comment at the end of each command explains who owns the records.
        """
        options = list(self.options)
        if declaration.absolute() != self.path.absolute():
            options += ["--declaration", str(declaration.absolute())]
        owner = shlex.join(("fedsynth", "synthesize", *options, "--out", "share"))
        lines = [f"{owner}  # one owner of all records"]
        if self.by_site:
            method = () if "--method" in options else ("--method", "fedstats")
            sites = shlex.join(("fedsynth", "train", *method, *options))
            lines.append(f"{sites}  # each site is a client")
        return lines


def describe_folder(
    settings: FolderSettings, note: Callable[[str], None], name: str | None = None
) -> Described:
    """Reads all images in a folder, or all records in a file, and proposes a declaration.

    Args:
        settings: the folder or file, and the size to which images are resized.
        note: a function that receives messages about skipped files.
        name: the data set's name. None uses the folder's name.

    Raises:
        DataError: in the same cases as `load_records`.
    """
    splits = splits_of(settings.folder, settings, note, settings.decoding(), settings.revision)
    records = training_records(splits, settings, note)
    # never computed from the values; empty if the settings have none
    limits: tuple[float, ...] | None = settings.limits()
    readable = settings
    if records.are_images or (limits is None and records.values.dtype == np.uint8):
        limits = None
    elif limits is None:
        limits = ()
        readable = replace(settings, bounds="0,1")  # only the labels are used
    spec = spec_of(records, readable, name or default_name(settings.folder))
    train = as_data(records, spec, note)
    sites = records.site_names
    parts = by_site(records, None)[0] or (np.arange(len(train)),)
    counts = count_matrix(train.labels.numpy(), parts, spec.classes)
    lines = [f"sites {_numbered(sites or ('all',))}", f"classes {_numbered(spec.class_names)}"]
    lines.append(partition_table(counts))
    shared = 0
    if train.groups is not None:
        homes = [np.unique(train.groups[torch.from_numpy(part)]) for part in parts]
        shared = int((np.unique(np.concatenate(homes), return_counts=True)[1] > 1).sum())
        users = f"users: {len(train.groups.unique())}"
        lines.append(
            f"{users}, of whom {shared} have records at several sites" if shared else users
        )
    ledger = LEDGERS
    if not records.are_images:  # other data sets may lie in the same folder
        ledger = f"{LEDGERS}/{site_names((spec.name,))[0]}"
    text = _proposal(train, sites, limits, ledger)
    return Described(
        text,
        "\n".join(lines),
        default_declaration(Path(settings.folder)),
        _options(settings, train),
        by_site=len(sites) > 1 and not shared,
    )


def _options(settings: FolderSettings, train: ImageData) -> tuple[str, ...]:
    """Returns the command-line options of a private run on the images, except `--declaration`."""
    options = ["--data", settings.folder, "--dp-epsilon", "8"]
    if train.spec.image_shape[:2] == (1, 1):  # FedDM's default settings are for images
        options += ["--method", "fedstats"]
    largest = coarse(2 * len(train), up=True)
    if PrivacySettings.delta * largest > 1:
        options += ["--dp-delta", f"{10.0 ** -len(str(largest)):g}"]
    if train.groups is not None:
        options += ["--dp-unit", USER]
    columns = ("feature_columns", "label_column", "user_column", "site_column", "revision")
    for key in (*columns, "skip_corrupt", "skip_other"):
        if value := getattr(settings, key):
            options += [f"--{key.replace('_', '-')}", *([] if value is True else [value])]
    return tuple(options)


def _numbered(names: Sequence[str]) -> str:
    return ", ".join(f"{number}: {name}" for number, name in enumerate(names))


def coarse(count: float, *, up: bool = False) -> int:
    """Rounds a count to a round number that hides the exact count.

    The result is 1, 2 or 5 times a power of ten: the nearest, or the next higher one if `up` is
    true.

    >>> coarse(570), coarse(640, up=True), coarse(3)
    (500, 1000, 2)
    """
    steps = np.outer(10 ** np.arange(15), (1, 2, 5)).flatten()
    if up:
        return int(steps[np.searchsorted(steps, count)])
    return int(steps[np.abs(np.log(steps / max(count, 1))).argmin()])


def _proposal(
    train: ImageData, sites: Sequence[str], limits: Sequence[float] | None, ledger: str
) -> str:
    """Returns a proposed declaration as TOML text, which a person must check.

    Args:
        train: the images. The text contains rounded image and person counts.
        sites: the names of the sites.
        limits: the bounds of non-byte values. Empty if a person must fill them in, and None for
            bytes.
        ledger: the folder of the ledgers, relative to the declaration.
    """
    spec, images = train.spec, len(train)
    users = 0
    if train.groups is not None:
        users = len(train.groups.unique())
    toml = partial(json.dumps, ensure_ascii=False)
    bounds = ""
    if limits is not None:
        bounds = (
            f"bounds = {toml(limits)}  # FILL IN or confirm: the smallest and largest value, known "
            "without these data\n"
        )
    return f"""\
# What is PUBLIC of these images or records, proposed by `fedsynth data describe`.
#
# Everyone may know this: it appears in privacy reports, and it determines divisors, sampling rates
# and the shapes of exported tensors. Nothing else about the images is public.
# The values below were read from the data. A PERSON MUST CHECK EACH LINE: enter what you would
# publish, not exact counts. Then fill in [signed_off]: without it, no run with differential
# privacy starts.

[images]
name = {toml(spec.name)}
class_names = {toml(spec.class_names)}  # in this order; include classes that some sites lack
sites = {toml(sites)}  # public names; [] if the data have a single owner
channels = {spec.channels}  # 1: grey, 3: colour
height = {spec.height}  # every image is resized to this
width = {spec.width}
mean = {toml(spec.mean[:1])}  # of pixels in [0, 1], for all channels or for each: constants, not
std = {toml(spec.std[:1])}  # computed from these images
window = "{window_text(spec.window)}"  # CENTER,WIDTH of the levels shown, if files have more than 8 bits; "": theirs
slice = {spec.slice}  # of files with several slices or frames, from 0; -1: the middle one
source = {toml(spec.source)}
features = {toml(spec.features)}  # the columns of a table's values, in this order; [] for others
{bounds}person = "person"  # the word for one person in the privacy report, such as "patient"

[sizes]
# Rounded public estimates. A wrong `images` makes results worse, but not less private.
# `most_images` must be a true upper bound (δ is checked against it).
images = {coarse(images)}  # approximate number at all sites together
most_images = {coarse(2 * images, up=True)}  # upper bound of the number of images
# Approximate number of people at all sites together, for runs that protect users; 0: unknown.
users = {coarse(users) * (users > 0)}

[privacy]
# The folder of the ledgers, which record the ε spent on these images over all runs. Do not delete
# it, and give no one access to its folder `private`. Relative to this file. Name one folder for all
# files that have some of the same records.
ledger = {toml(ledger)}

[signed_off]
by = ""  # the person who checked all of the above
date = ""  # such as 2026-11-23
"""
