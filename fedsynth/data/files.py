"""Names of data folders, and text and tensors from untrusted files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from fedsynth.errors import DataFilesMissingError
from fedsynth.privacy.files import MAX_TENSORS_BYTES, decode_json, expand_home, read_regular

MAX_LIST_BYTES = 2**26
"""Size limit of a text file that lists images or users: DomainNet's longest has 5 MB."""


def one_line(value: object, limit: int = 200) -> str:
    """Returns text from a file, or from an error that quotes a file, as at most `limit` printable
    characters on one line."""
    text = " ".join(str(value).split()) or type(value).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def first_fault(error: ValidationError) -> str:
    """Returns the first fault that pydantic found in untrusted values, and its place."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, fault["loc"]))[:80]
    return one_line(f"{place}: {fault['msg']}".removeprefix(": "), 300)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors in a safetensors file by name, and its metadata.

    Raises:
        OSError: as for `open_regular`.
        ValueError: the file is damaged.
    """
    content = read_regular(path, MAX_TENSORS_BYTES)
    try:
        tensors = safetensors.torch.load(content)
        end = 8 + int.from_bytes(content[:8], "little")
        metadata = decode_json(content[8:end]).get("__metadata__") or {}
    except (SafetensorError, LookupError, RuntimeError, TypeError) as error:
        # in addition to safetensors' own errors: types and sizes that torch does not support
        raise ValueError(one_line(error)) from None
    return tensors, metadata


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Writes tensors to a safetensors file with mode 0644; safetensors itself makes files readable
    only by their owner.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(on_cpu, file, metadata=dict(metadata) or None)
    file.chmod(0o644)


def expanded(folder: str | Path) -> Path:
    """Expands `~` in a data folder's name.

    Raises:
        DataFilesMissingError: the name has bytes that a run's config.toml cannot hold, or `~`
            refers to an unknown user.
    """
    name = str(folder)
    if "\0" in name or name.encode(errors="replace").decode() != name:
        raise DataFilesMissingError(
            f"the data folder's name, {one_line(ascii(name))}, is not UTF-8 text without zero "
            "bytes, which a run's config.toml requires"
        )
    try:
        return expand_home(folder)
    except FileNotFoundError as error:
        raise DataFilesMissingError(
            f"the data folder {one_line(folder)}: {error.strerror}; use the folder's full path"
        ) from None
