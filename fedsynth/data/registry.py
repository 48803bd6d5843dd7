"""The data sets fedsynth knows by name, as plain facts. No torch here: the command line's `--help`
reads this file.

Everything in a `DatasetSpec` is a published constant. Nothing is computed from the examples at
hand, so all of it may be used under differential privacy (the size of the training split as a
public divisor, the normalisation constants).
"""

from __future__ import annotations

import functools
import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fedsynth.errors import SettingError, UnknownNameError, unknown_name
from fedsynth.privacy.wording import shown

LONGEST_NAME = 200


@dataclass(frozen=True)
class DatasetSpec:
    """The shape, sizes and constants of one data set; make one to use `from_arrays` with your own
    images.

    Args:
        name: for reports and file names.
        channels: C of an image [C, H, W].
        height: H, pixels.
        width: W, pixels.
        classes: number of classes.
        train_size: published number of training examples, never read from the data.
        test_size: published number of test examples, likewise.
        mean: of each channel, for pixels in [0, 1].
        std: of each channel, for pixels in [0, 1].
        class_names: one for each class.
        source: where the data come from.
        domains: names of where examples come from, in data sets that say so.
        groups: the published number of writers or devices (0: none is known), from which the
            nominal size of one of them follows.

    Raises:
        SettingError: a size that is not positive, constants and names that do not fit `channels`
            and `classes`, or a name that cannot be printed.

    >>> sizes = {"channels": 3, "height": 32, "width": 32, "train_size": 5000, "test_size": 500}
    >>> half = (0.5, 0.5, 0.5)
    >>> two = {"classes": 2, "class_names": ("healthy", "ill")}
    >>> spec = DatasetSpec("scans", **sizes, **two, mean=half, std=half, source="our clinic")
    >>> spec.image_shape
    (3, 32, 32)
    """

    name: str
    channels: int
    height: int
    width: int
    classes: int
    train_size: int
    test_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    source: str
    domains: tuple[str, ...] = ()
    groups: int = 0

    def __post_init__(self) -> None:
        self._check_names()
        of = f"of data set {self.name!r}"
        for field in ("channels", "height", "width", "classes", "train_size", "test_size"):
            if getattr(self, field) < 1:
                got = getattr(self, field)
                raise SettingError(None, field, f"{of} must be at least 1, got {got}")
        for field in ("mean", "std"):
            values = getattr(self, field)
            if len(values) != self.channels:
                raise SettingError(
                    None,
                    field,
                    f"{of} needs one number for each of the {self.channels} channels, got "
                    f"{len(values)}",
                )
            if not all(map(math.isfinite, values)):
                raise SettingError(None, field, f"{of} must be finite, got {values}")
        if min(self.std) <= 0:
            raise SettingError(None, "std", f"{of} must be positive, got {self.std}")
        if len(self.class_names) != self.classes:
            got = len(self.class_names)
            raise SettingError(None, "class_names", f"{of} must be {self.classes} names, got {got}")

    def _check_names(self) -> None:
        """Reports, config.toml and tables say them."""
        if not (0 < len(self.name) <= LONGEST_NAME and self.name.isprintable()):
            raise SettingError(
                None,
                "name",
                f"of a data set must be 1 to {LONGEST_NAME} printable characters, got "
                f"{shown(self.name)}",
            )
        for name in (*self.class_names, *self.domains):
            if len(name) > LONGEST_NAME or not name.isprintable():
                raise SettingError(
                    None,
                    "class_names",
                    f"and domains of data set {self.name!r} must each be at most {LONGEST_NAME} "
                    f"printable characters, got {shown(name)}",
                )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return self.channels, self.height, self.width


_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TEN_DIGITS = tuple("0123456789")
_TEN_OBJECTS = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard "
    "lion lizard "
    "lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter "
    "palm_tree pear "
    "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose "
    "sea seal shark "
    "shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table "
    "tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

_SPECS = (
    DatasetSpec(
        name="digits",
        channels=1,
        height=8,
        width=8,
        classes=10,
        train_size=1438,
        test_size=359,
        # Taken once from the 1,438 training images that scikit-learn ships, as others did for
        # MNIST; fixed since then.
        mean=(0.3059,),
        std=(0.3763,),
        class_names=_TEN_DIGITS,
        source=(
            "scikit-learn's bundled handwritten digits (UCI optdigits, its test part); every "
            "fifth image tests"
        ),
    ),
    DatasetSpec(
        name="mnist",
        channels=1,
        height=28,
        width=28,
        classes=10,
        train_size=60_000,
        test_size=10_000,
        mean=(0.1307,),
        std=(0.3081,),
        class_names=_TEN_DIGITS,
        source="MNIST, LeCun, Cortes and Burges, 1998",
    ),
    DatasetSpec(
        name="fashion-mnist",
        channels=1,
        height=28,
        width=28,
        classes=10,
        train_size=60_000,
        test_size=10_000,
        mean=(0.2860,),
        std=(0.3530,),
        class_names=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        source="Fashion-MNIST, Xiao, Rasul and Vollgraf, 2017 (arXiv 1708.07747)",
    ),
    DatasetSpec(
        name="emnist-letters",
        channels=1,
        height=28,
        width=28,
        classes=26,
        train_size=124_800,
        test_size=20_800,
        mean=(0.1722,),
        std=(0.3309,),
        class_names=tuple("abcdefghijklmnopqrstuvwxyz"),
        source="EMNIST, letters split, Cohen, Afshar, Tapson and van Schaik, 2017 "
        "(arXiv 1702.05373)",
    ),
    DatasetSpec(
        name="cifar10",
        channels=3,
        height=32,
        width=32,
        classes=10,
        train_size=50_000,
        test_size=10_000,
        # The deviations are the condensation literature's (means of per-image deviations; the
        # pixels' own are 0.247, 0.243, 0.262), because its numbers were made with them.
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        class_names=_TEN_OBJECTS,
        source="CIFAR-10, Krizhevsky, 2009",
    ),
    DatasetSpec(
        name="cifar100",
        channels=3,
        height=32,
        width=32,
        classes=100,
        train_size=50_000,
        test_size=10_000,
        mean=(0.5071, 0.4866, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        class_names=tuple(_CIFAR100_CLASSES.split()),
        source="CIFAR-100 (fine labels), Krizhevsky, 2009",
    ),
    DatasetSpec(
        name="svhn",
        channels=3,
        height=32,
        width=32,
        classes=10,
        train_size=73_257,
        test_size=26_032,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        class_names=_TEN_DIGITS,
        source="SVHN, cropped digits, Netzer et al., 2011 (without the extra split)",
    ),
    DatasetSpec(
        name="cinic10",
        channels=3,
        height=32,
        width=32,
        classes=10,
        train_size=90_000,
        test_size=90_000,
        mean=(0.47889522, 0.47227842, 0.43047404),
        std=(0.24205776, 0.23828046, 0.25874835),
        class_names=_TEN_OBJECTS,
        source=(
            "CINIC-10, Darlow, Crowley, Antoniou and Storkey, 2018 (arXiv 1810.03505), its "
            "training and test thirds"
        ),
    ),
    DatasetSpec(
        name="tiny-imagenet",
        channels=3,
        height=64,
        width=64,
        classes=200,
        train_size=100_000,
        test_size=10_000,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        # Its classes are WordNet numbers, which the data set's own list names: class c is the c-th
        # of them, sorted.
        class_names=tuple(f"class {c}" for c in range(200)),
        source=(
            "Tiny-ImageNet, Stanford's CS231n, 2015 (200 classes of ImageNet at 64×64); its "
            "validation images test"
        ),
    ),
    DatasetSpec(
        name="femnist",
        channels=1,
        height=28,
        width=28,
        classes=62,
        # Nine tenths and one tenth of the published 805,263 examples of 3,550 writers. What LEAF's
        # scripts make depends on how they are called, and on their version (a public copy has
        # 817,851 of 3,597): with differential privacy declare max_records if there are more.
        train_size=724_737,
        test_size=80_526,
        # What public code on LEAF's files uses, where white is 1; EMNIST's are white on black
        # (0.17).
        mean=(0.9637,),
        std=(0.1591,),
        class_names=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        source="FEMNIST, Caldas et al., LEAF, 2018 (arXiv 1812.01097): NIST's characters by writer",
        groups=3_550,
    ),
    DatasetSpec(
        name="office-caltech-10",
        channels=3,
        height=64,
        width=64,
        classes=10,
        train_size=2042,
        test_size=491,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        class_names=(
            "backpack",
            "bike",
            "calculator",
            "headphones",
            "keyboard",
            "laptop_computer",
            "monitor",
            "mouse",
            "mug",
            "projector",
        ),
        source=(
            "Office-Caltech-10, Gong, Shi, Sha and Grauman, 2012, resized to 64×64; every fifth "
            "image of a domain and class tests"
        ),
        domains=("amazon", "caltech", "dslr", "webcam"),
    ),
    DatasetSpec(
        name="domainnet-10",
        channels=3,
        height=64,
        width=64,
        classes=10,
        # Round public figures, not counts: how many images the official lists hold of these classes
        # is nowhere printed.
        train_size=20_000,
        test_size=9_000,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        class_names=(
            "bird",
            "feather",
            "headphones",
            "ice_cream",
            "teapot",
            "tiger",
            "whale",
            "windmill",
            "wine_glass",
            "zebra",
        ),
        source=(
            "DomainNet, Peng et al., 2019: FedBN's ten classes (arXiv 2102.07623), official "
            "lists, resized to 64×64"
        ),
        domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    ),
)

# α and β of synthetic(α,β): plain numbers that `{:g}` writes as they are, so that a run's config
# names its data set exactly.
_NUMBER = r"([0-9]{1,2}(?:\.[0-9]{1,4})?)"
_SYNTHETIC = re.compile(rf"synthetic\( *(?:iid|{_NUMBER} *, *{_NUMBER}) *\)")


def synthetic_parameters(name: str) -> tuple[float, float] | tuple[None, None] | None:
    """(α, β) of `synthetic(α,β)`, two times None for `synthetic(iid)`, and None for any other
    name."""
    match = _SYNTHETIC.fullmatch(name)
    if match is None:
        return None
    alpha, beta = match.groups()
    return (None, None) if alpha is None else (float(alpha), float(beta))


@functools.lru_cache(maxsize=64)
def _synthetic_spec(alpha: float | None, beta: float | None) -> DatasetSpec:
    """FedProx's synthetic data sets (`fedsynth.data.synthetic` makes them); all have the same
    devices' sizes."""
    iid = alpha is None or beta is None
    # four standard deviations of the first feature over all devices
    reach = 4 * math.sqrt(1 if beta is None else beta**2 + 2)
    return DatasetSpec(
        name="synthetic(iid)" if iid else f"synthetic({alpha:g},{beta:g})",
        channels=1,
        height=1,
        width=60,
        classes=10,
        train_size=6_743,
        test_size=764,
        mean=(0.5,),
        std=(1 / (2 * reach),),
        class_names=_TEN_DIGITS,
        source=(
            "Synthetic data of 30 devices, Li et al., FedProx, 2020 (arXiv 1812.06127), made from "
            "seed 0"
        ),
        groups=30,
    )


_SYNTHETIC_SPECS = (_synthetic_spec(None, None), *(_synthetic_spec(a, a) for a in (0.0, 0.5, 1.0)))
DEFAULT_DATASET = "digits"
DATASETS: Mapping[str, DatasetSpec] = MappingProxyType(
    {spec.name: spec for spec in (*_SPECS, *_SYNTHETIC_SPECS)}
)
"""By name. Of the synthetic(α,β), which `dataset_spec` knows for all numbers from 0 to 99.9999,
these are the paper's."""


def is_known(name: str) -> bool:
    """Whether a data set of this name is published."""
    try:
        dataset_spec(name)
    except (UnknownNameError, SettingError):
        return False
    return True


def is_published(spec: DatasetSpec) -> bool:
    """Whether this is a named data set's specification: anybody can get or compute its records."""
    try:
        return dataset_spec(spec.name) == spec
    except (UnknownNameError, SettingError):
        return False


def dataset_spec(name: str) -> DatasetSpec:
    """The spec called `name`: one of `DATASETS`, or `synthetic(α,β)` with other numbers, up to four
    decimals.

    Raises:
        UnknownNameError: no such data set; the message has the near matches.
    """
    parameters = synthetic_parameters(name)
    if parameters is not None:
        return _synthetic_spec(*parameters)
    try:
        return DATASETS[name]
    except KeyError:
        raise unknown_name("data set", name, DATASETS, "data", "dataset") from None
