"""Converts exceptions about untrusted values to lines for error messages."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

MAX_SHOWN_FAULTS = 10
MAX_SHOWN_KEY = 80
_REASONS = {"missing": "is missing", "extra_forbidden": "is an unknown key"}
# The exceptions that code may raise if a damaged file gives it unexpected values.
HOSTILE = (
    *(LookupError, TypeError, AttributeError, ValueError),
    *(ArithmeticError, RecursionError, MemoryError),
)


def faults(error: ValidationError) -> list[str]:
    """Converts a pydantic error to short lines, one for each fault of the value.

    If there are more than `MAX_SHOWN_FAULTS`, the last line states how many were left out.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for fault in errors[:MAX_SHOWN_FAULTS]:
        path = ".".join(short_key(str(part)) for part in fault["loc"]) or "the content"
        lines.append(f"{path} {_REASONS.get(fault['type'], 'is wrong: ' + fault['msg'])}")
    if len(errors) > MAX_SHOWN_FAULTS:
        lines.append(f"and {len(errors) - MAX_SHOWN_FAULTS} more")
    return lines


@contextmanager
def faults_as(make_error: Callable[[str], Exception], complaint: str) -> Iterator[None]:
    """Converts a pydantic error in the `with` block to another error, which names the first fault.

    Args:
        make_error: makes the other error from its message.
        complaint: the beginning of the message.
    """
    try:
        yield
    except ValidationError as error:
        raise make_error(f"{complaint}: {faults(error)[0]:.300}") from None


def short_key(name: str) -> str:
    """Shortens and escapes an untrusted key for error messages."""
    if len(name) <= MAX_SHOWN_KEY and name.isprintable():
        return name
    return reprlib.repr(name)
