"""Helpers for data files: safe text for messages, safetensors files, and names of data folders."""

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
"""Size limit of a text file that lists images or users. The longest list of DomainNet has 5 MB."""


def one_line(value: object, limit: int = 200) -> str:
    """Returns untrusted text in a form that is safe to print.

    The result is one line of at most `limit` printable characters. The value may be text from a
    file, or an error that quotes a file.
    """
    text = " ".join(str(value).split()) or type(value).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def first_fault(error: ValidationError) -> str:
    """Describes the first error that pydantic found in untrusted values, and names its location."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, fault["loc"]))[:80]
    return one_line(f"{place}: {fault['msg']}".removeprefix(": "), 300)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the named tensors and the metadata of a safetensors file.

    Raises:
        OSError: in the same cases as `open_regular`.
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
    """Writes tensors to a safetensors file that all users of the computer may read (mode 0644).

    The safetensors library by itself writes files that only their owner may read.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(on_cpu, file, metadata=dict(metadata) or None)
    file.chmod(0o644)


def expanded(folder: str | Path) -> Path:
    """Expands `~` in the name of a data folder.

    Raises:
        DataFilesMissingError: the name contains bytes that a run's config.toml cannot store, or
            `~` is followed by an unknown user.
    """
    name = str(folder)
    if "\0" in name or name.encode(errors="replace").decode() != name:
        raise DataFilesMissingError(
            f"the name of the data folder, {one_line(ascii(name))}, must be UTF-8 text without "
            "zero bytes, because a run's config.toml stores it"
        )
    try:
        return expand_home(folder)
    except FileNotFoundError as error:
        raise DataFilesMissingError(
            f"cannot find the data folder {one_line(folder)}: {error.strerror}; use its full path"
        ) from None
