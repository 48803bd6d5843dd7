"""Reads LEAF's text data sets Shakespeare and Sent140, which are grouped by role or author.

The files are those of LEAF (Caldas et al., 2018, arXiv 1812.01097), with a user for each role of a
play or each author of tweets: {"users": [user], "num_samples": [n], "user_data": {user: {"x": […],
"y": […]}}}. The data folder contains `shakespeare/train/*.json` and `shakespeare/test/*.json`, or
undivided records in `shakespeare/all_data*.json`, and the same for `sent140`. Undivided records are
split as in LEAF and FedProx: a random 80 % of each user's records are for training. LEAF drops
users with one record. Here, their record is for training.

Shakespeare (next character): x is 80 characters, and y is the next one. Tokens are indices in
LEAF's list of 80 characters.

Sent140 (sentiment): x is [ID, date, query, user, text] of a tweet. y is 0 or "0" if it is negative,
and 1 or "4" if it is positive. As in LEAF, the first 25 words and punctuation marks of a text are
used unchanged. Shorter texts are padded with an unknown word.

- `sent140`: a word's token is 1 plus a hash of the word modulo 9,999, because a list of occurring
  words would reveal single authors' words. Token 0 is padding. A network learns the token vectors.
- `sent140-glove`: words are replaced by GloVe's fixed vectors, which the user downloads as
  `sent140/glove.6B.300d.txt` (https://nlp.stanford.edu/projects/glove/). A record is a time series
  [300, 1, 25] of vectors, which takes 30 kB. Unknown words are zero.

`plays` is a small data set in Shakespeare's format, made from passages in the package: the 80
characters before every fourth character of a passage.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field

from fedsynth.data.files import Split
from fedsynth.data.images import Bytes, Floats
from fedsynth.data.published_folders import MAX_JSON_BYTES, Users, read_users, splits_of
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, faults_as, one_line
from fedsynth.files import open_regular, read_regular
from fedsynth.seeding import numpy_generator

# The data sets that LEAF writes for a sample of users.
LEAF = ("femnist", "shakespeare", "sent140", "sent140-glove")
TRAINING_SHARE = 0.8

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
CONTEXT = 80
_LETTER = r"[\n !\"&'(),\-.0-9:;>?A-Z\[\]a-z}]"
PLAYS = Path(__file__).with_name("plays.txt")
PLAYS_STEP = 4

TWEET_LENGTH = 25
_WORD = re.compile(r"[\w']+|[.,!?;]")
GLOVE = "glove.6B.300d.txt"
MAX_GLOVE_BYTES = 2**32


class _Passages(BaseModel):
    model_config = ConfigDict(strict=True)
    x: Annotated[
        list[Annotated[str, Field(pattern=f"^{_LETTER}{{{CONTEXT}}}$")]],
        FailFast(),
    ]
    y: Annotated[list[Annotated[str, Field(pattern=f"^{_LETTER}$")]], FailFast()]


class _Tweets(BaseModel):
    model_config = ConfigDict(strict=True)
    x: Annotated[list[Annotated[list[str], Field(min_length=5)]], FailFast()]
    y: Annotated[list[Literal[0, 1, "0", "4"]], FailFast()]


class _PassageFile(BaseModel):
    model_config = ConfigDict(strict=True)
    user_data: dict[str, _Passages]


class _TweetFile(BaseModel):
    model_config = ConfigDict(strict=True)
    user_data: dict[str, _Tweets]


def read_shakespeare(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Shakespeare's training and test splits. The groups are the roles.

    Raises:
        OSError: a file is missing or cannot be read.
        DataFilesCorruptError: a file does not have LEAF's format. The message names the file, the
            user and the record.
    """

    def read(path: Path) -> Users:
        return _passages(_parsed(path, _PassageFile).user_data)

    return _read(root / "shakespeare", read)


def read_sent140(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Sent140's training and test splits as hashed words. The groups are the authors.

    Raises:
        OSError, DataFilesCorruptError: as for `read_shakespeare`.
    """
    buckets = spec.vocabulary - 1
    return _read_tweets(root, lambda word: 1 + zlib.crc32(word.encode()) % buckets)


def read_sent140_glove(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads Sent140's training and test splits as GloVe's vectors. The groups are the authors.

    Raises:
        OSError, DataFilesCorruptError: as for `read_shakespeare`, also for the vector file.
    """
    rows: dict[str, int] = {}  # the words' rows in the vector table
    splits = _read_tweets(root, lambda word: rows.setdefault(word, len(rows) + 1))
    low, high = spec.bounds or (0.0, 1.0)
    vectors = read_vectors(root / "sent140" / GLOVE, rows, spec.channels)
    table = ((vectors - low) / (high - low)).clip(0, 1).astype(np.float32)

    def embedded(split: Split) -> Split:
        images = table[split.images[:, 0, 0]].transpose(0, 2, 1)[:, :, None]
        return replace(split, images=np.ascontiguousarray(images))

    return embedded(splits[0]), embedded(splits[1])


def read_plays() -> tuple[Split, Split]:
    """Reads the package's passages from Shakespeare, with roles as groups."""
    content = leaf_form(PLAYS.read_text(encoding="utf-8"), PLAYS_STEP)
    return splits_of(*_divided(_passages(_PassageFile.model_validate(content).user_data)))


def leaf_form(passages: str, step: int = 1) -> dict[str, Any]:
    """Converts passages to LEAF's file format.

    Args:
        passages: lines with a role's name, a tab and the role's text.
        step: the number of characters between records, which is 1 in LEAF.

    >>> leaf_form("ROMEO\\t" + 80 * "a" + "bc")["user_data"]["ROMEO"]["y"]
    ['b', 'c']
    """
    user_data = {}
    for line in passages.splitlines():
        user, _, text = line.partition("\t")
        starts = range(0, len(text) - CONTEXT, step)
        x = [text[start : start + CONTEXT] for start in starts]
        user_data[user] = {"x": x, "y": [text[start + CONTEXT] for start in starts]}
    sizes = [len(records["y"]) for records in user_data.values()]
    return {"users": list(user_data), "num_samples": sizes, "user_data": user_data}


def _parsed(path: Path, form: type[Any]) -> Any:
    with faults_as(DataFilesCorruptError, f"{path} is not a LEAF file"):
        content = form.model_validate_json(read_regular(path, MAX_JSON_BYTES))
    for user, records in content.user_data.items():
        if len(records.x) != len(records.y):
            raise DataFilesCorruptError(
                f"user {one_line(repr(user), 80)} in {path} has {len(records.x)} records, but "
                f"{len(records.y)} labels. Create the files again"
            ).with_code("data.leaf_labels")
    return content


def _read(folder: Path, read: Callable[[Path], Users]) -> tuple[Split, Split]:
    """Reads the training and test splits from LEAF's files in a folder.

    If there is no folder `train`, the records are split at random.
    """
    if (folder / "train").is_dir():
        return splits_of(*(read_users(folder / name, read) for name in ("train", "test")))
    return splits_of(*_divided(read_users(folder, read, "all_data*.json")))


def _divided(users: Users) -> tuple[Users, Users]:
    """Splits each user's records at random into training and test records."""
    train: Users = {}
    test: Users = {}
    for name, (x, y) in users.items():
        order = numpy_generator(0, f"LEAF split {name}").permutation(len(y))
        count = max(1, int(TRAINING_SHARE * len(y)))
        for split, chosen in ((train, order[:count]), (test, order[count:])):
            split[name] = x[np.sort(chosen)], y[np.sort(chosen)]
    return train, test


def _passages(user_data: Mapping[str, _Passages]) -> Users:
    users: Users = {}
    for name, records in user_data.items():
        x = _positions("".join(records.x)).reshape(-1, 1, 1, CONTEXT)
        users[name] = x, _positions("".join(records.y)).astype(np.int64)
    return users


def _positions(text: str) -> Bytes:
    """Returns the index in `LETTERS` of each character in a text."""
    codes, letters = (np.frombuffer(s.encode("ascii"), np.uint8) for s in (text, LETTERS))
    return np.searchsorted(letters, codes).astype(np.uint8)  # LETTERS is sorted


def _read_tweets(root: Path, number_of: Callable[[str], int]) -> tuple[Split, Split]:
    """Reads Sent140's tweets, and converts words to tokens with a given function."""

    def read(path: Path) -> Users:
        users: Users = {}
        for name, records in _parsed(path, _TweetFile).user_data.items():
            tokens = np.zeros((len(records.x), 1, 1, TWEET_LENGTH), np.int32)
            for row, tweet in zip(tokens[:, 0, 0], records.x, strict=True):
                numbers = list(map(number_of, _WORD.findall(tweet[4])[:TWEET_LENGTH]))
                row[: len(numbers)] = numbers
            labels = [int(y in (1, "4")) for y in records.y]
            users[name] = tokens, np.array(labels, np.int64)
        return users

    return _read(root / "sent140", read)


def read_vectors(path: Path, rows: Mapping[str, int], size: int) -> Floats:
    """Reads the vectors for the words in `rows` from a GloVe file, float64 [len(rows) + 1, size].

    Row 0, and the rows of words missing from the file, are zero.
    """
    table = np.zeros((len(rows) + 1, size))
    with BufferedReader(open_regular(path, max_bytes=MAX_GLOVE_BYTES)) as file:
        for number, line in enumerate(file, start=1):
            word, _, numbers = line.decode(errors="replace").rstrip().partition(" ")
            if word not in rows:
                continue
            try:
                table[rows[word]] = np.array(numbers.split(" "), np.float64)
            except ValueError:
                table[rows[word]] = np.nan
            if not np.isfinite(table[rows[word]]).all():
                raise DataFilesCorruptError(
                    f"line {number} of {path} is not a word with {size} numbers. Download the file "
                    "again"
                ).with_code("data.vectors")
    return table
