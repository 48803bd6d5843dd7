"""The errors that fedsynth raises.

Each error has a one-line message that states the fault and the expected value. The command line
prints the message and exits with code 2.

Each error also has a stable `code` for programs, whereas messages may change. A setting's code is
its name, such as "method.ipc", or an argument's name. An invalid upload has the code
"upload.FIELD". Other codes are "area.what", such as "files.lock". Most are set in the class
definition, and the others by `with_code`. With --json, the command line prints {"error": {"code":
..., "message": ...}} on stdout.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_SHOWN_FAULTS = 10
MAX_SHOWN_KEY = 80
_REASONS = {"missing": "is missing", "extra_forbidden": "is an unknown key"}
# The exceptions that unexpected values in a damaged file may cause.
HOSTILE = (
    *(LookupError, TypeError, AttributeError, ValueError),
    *(ArithmeticError, RecursionError, MemoryError),
)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def short_repr(value: object) -> str:
    """Represents a value in one short line, for error messages.

    The value may come from an untrusted file, so it may be very long or deeply nested.

    >>> short_repr("x" * 1000)[-5:], short_repr(10**5000)
    ("xxxx'", 'a number of more than 18 digits')
    """
    if isinstance(value, int) and abs(value) >= 2**63:  # Python prints at most 4,300 digits
        return "a number of more than 18 digits"
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # such a number, or deep nesting, within a list
        return f"a {type(value).__name__}"


def setting_name(section: str | None, key: str) -> str:
    """Returns a setting's full name for error messages, such as "method.ipc".

    Args:
        section: the section of the config file. None if the setting is an argument of a function
            or class.
        key: the name of the setting within the section.
    """
    if section is None:
        return key
    return f"{section}.{key}"


class FedsynthError(Exception):
    """Base class for all errors that users can cause. The message `str(error)` has one line.

    >>> DataError("labels are missing").with_code("data.labels")
    <DataError data.labels: labels are missing>
    """

    code = "error.unspecified"

    def __init_subclass__(cls, code: str = "") -> None:
        cls.code = code or cls.code

    def with_code(self, code: str) -> Self:
        """Replaces the code of this error, and returns the error."""
        self.code = code
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.code}: {self}>"


class UnknownNameError(FedsynthError, code="name.unknown"):
    """Raised for an unknown method, data set or model, or for an unknown setting value.

    Args:
        text: the one-line message, which names valid alternatives.
        section, key: the setting whose value is unknown. Both are None if the name is not a
            setting's value.
    """

    def __init__(self, text: str, section: str | None = None, key: str | None = None) -> None:
        self.section = section
        self.key = key
        super().__init__(text, section, key)
        if key is not None:
            self.code = setting_name(section, key)

    def __str__(self) -> str:
        return str(self.args[0])


class SettingError(FedsynthError, code="setting"):
    """Raised if a setting is out of range or contradicts another setting.

    Args:
        section: the setting's section in a config file, such as "run" or "privacy". None for an
            argument of a Python function or class.
        key: the setting's name in the section.
        reason: the message's text after the setting's name.
        value: the setting's value, if the message shows it.

    >>> str(SettingError("method", "ipc", "must be at least 1, got 0"))
    'method.ipc must be at least 1, got 0'
    """

    def __init__(self, section: str | None, key: str, reason: str, value: object = None) -> None:
        self.section = section
        self.key = key
        self.reason = reason
        self.value = value
        setting = setting_name(section, key)
        if value is not None:
            setting += f"={value}"
        super().__init__(f"{setting} {reason}")
        self.code = setting_name(section, key)

    def of(self, section: str | None, key: str) -> SettingError:
        """Returns a copy of this error that names another setting.

        Use it for a value copied from another setting, so that the message names the setting that
        the user wrote.
        """
        return type(self)(section, key, self.reason, self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.section, self.key, self.reason, self.value), self.__dict__


class DataError(FedsynthError, code="data.invalid"):
    """Raised for images or labels that cannot be used.

    Examples are a wrong shape or type, NaN, or a class without examples.
    """


class DataFilesMissingError(DataError, code="data.missing"):
    """Raised if a data set's files are missing."""


class DataFilesCorruptError(DataError, code="data.damaged"):
    """Raised if a data set's files exist, but cannot be read in the expected format."""


class PartitionError(FedsynthError, code="partition.impossible"):
    """Raised if the requested partition is impossible, such as 5 examples among 10 clients."""


class DivergedError(FedsynthError, code="training.diverged"):
    """Raised if training or another optimisation diverged to non-finite values."""


class OutputError(FedsynthError, code="files.output"):
    """Raised if a run folder or another results file cannot be written or used."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts operating-system errors, such as a full disk, to OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}").with_code(
            "files.write"
        ) from None


class CheckpointError(FedsynthError, code="checkpoint.unusable"):
    """Raised if a run cannot be resumed, because its checkpoint is damaged or belongs to a run with
    other settings or data."""


class MessageError(FedsynthError, code="message.invalid"):
    """Raised if a message cannot be sent, or if a received message is invalid or unexpected."""


class UploadRejectedError(FedsynthError, code="upload"):
    """Raised by the server for an upload with an invalid form or value.

    Args:
        field: the invalid field of the message, or the invalid tensor in the message.
        reason: the message's text after the field's name.
        diverged: whether an honest client could send such an upload after diverged training.
    """

    def __init__(self, field: str, reason: str, diverged: bool = False) -> None:
        self.field = field
        self.reason = reason
        self.diverged = diverged
        super().__init__(field, reason, diverged)
        self.code = f"upload.{field:.200}"

    def __str__(self) -> str:
        return f"{self.field:.200} {self.reason}"


class DeviceError(FedsynthError, code="device.missing"):
    """Raised if the requested device, such as "cuda", does not exist."""


class DeviceMemoryError(FedsynthError, code="device.memory"):
    """Raised if the device has too little memory for one client's step."""


# ---------------------------------------------------------------------------------------- privacy


class PrivacyError(FedsynthError, code="privacy.refused"):
    """Base class of errors about privacy.

    A setting, a request or a file would break a privacy guarantee, or would lead to a report with a
    wrong guarantee.
    """


class PrivacySettingError(SettingError, PrivacyError):
    """Raised if a privacy parameter is out of range, such as a negative σ or a clip of 0.

    The arguments are section, key and reason, as for `SettingError`.
    """


class BudgetExceededError(PrivacyError, code="budget.exceeded"):
    """Raised if a release would raise a client's ε above the cap. The release is not made.

    Args:
        reason: the message.
        spent: the client's name, its current ε, and its ε after the release. None if unknown.
    """

    def __init__(self, reason: str, spent: tuple[str, float, float] | None = None) -> None:
        super().__init__(reason)
        self.spent = spent


class UnaccountedReleaseError(PrivacyError, code="release.unaccounted"):
    """Raised if a private run would send or show an unprotected value.

    A value is unprotected if it depends on private data and no mechanism has added noise.
    """


class UnplannedReleaseError(PrivacyError, code="release.unplanned"):
    """Raised if a method's step requests a release that was not planned.

    Either the method did not plan the release for the current exchange with the server, or the step
    has already made it.
    """


class ForbiddenLayerError(PrivacyError, code="model.layer"):
    """Raised if DP-SGD cannot train the model, for example because it has batch norm.

    Batch norm mixes the examples of a batch, so clipping each example's gradient would not bound
    the influence of one example.
    """


class SigningError(PrivacyError, code="signing.key"):
    """Raised if a run folder cannot be signed or a key cannot be used."""


class LedgerError(PrivacyError, code="ledger.unusable"):
    """Raised if a ledger cannot be read or written, or if it belongs to another data set."""


class RequestRefusedError(PrivacyError, code="request.refused"):
    """Raised if a private client refuses to answer a message from the server.

    For example, the message contains non-finite numbers, has a norm above `max_request_norm`, or
    has tensors of the wrong shape.
    """


# ----------------------------------------------------------------------------- text of messages


def unknown_name(
    kind: str, name: str, names: Iterable[str], section: str | None = None, key: str | None = None
) -> UnknownNameError:
    """Returns the error for a name that is not in `names`.

    Args:
        kind: the kind of thing that is named, such as "data set".
        name: the unknown name.
        names: the valid names. The error suggests similar names. If no name is similar, the error
            lists all names.
        section, key: the setting whose value is this name.
    """
    hint = _did_you_mean(name, names) or f"; the known names are {', '.join(sorted(names))}"
    return UnknownNameError(f"unknown {kind} {short_repr(name)}{hint}", section, key)


def unknown_value(
    section: str | None, key: str, value: str, choices: Iterable[str], context: str = ""
) -> UnknownNameError:
    """Returns the error for a setting whose value is not in `choices`.

    Args:
        section, key: the setting.
        value: the value of the setting.
        choices: the valid values. The error suggests similar values. If no value is similar, the
            error lists all values.
        context: what the choices apply to, such as " for convnet".
    """
    setting = setting_name(section, key)
    text = (
        f"{setting} must be one of {', '.join(sorted(choices))}, got {short_repr(value)}{context}"
    )
    if hint := _did_you_mean(value, choices):
        text = f"{setting} cannot be {short_repr(value)}{context}{hint}"
    return UnknownNameError(text, section, key)


def _did_you_mean(value: str, choices: Iterable[str]) -> str:
    """Returns a "did you mean" question, or an empty string if no name is similar."""
    near = difflib.get_close_matches(str(value)[:100].lower(), sorted(choices), n=3, cutoff=0.5)
    if not near:
        return ""
    return f"; did you mean {' or '.join(near)}?"


def one_line(value: object, limit: int = 200) -> str:
    """Returns untrusted text in a form that is safe to print.

    The result is one line of at most `limit` printable characters. The value may be text from a
    file, or an error that quotes a file. An operating system's error is reduced to its reason.
    """
    reason = value.strerror if isinstance(value, OSError) else None
    text = " ".join(str(reason or value).split()) or type(value).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def faults(error: ValidationError) -> list[str]:
    """Converts a pydantic error to short lines, one for each fault.

    If there are more than `MAX_SHOWN_FAULTS`, the last line counts the others.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for fault in errors[:MAX_SHOWN_FAULTS]:
        path = ".".join(short_key(str(part)) for part in fault["loc"]) or "the content"
        lines.append(f"{path} {_REASONS.get(fault['type'], 'is invalid: ' + fault['msg'])}")
    if len(errors) > MAX_SHOWN_FAULTS:
        lines.append(f"and {len(errors) - MAX_SHOWN_FAULTS} more")
    return lines


@contextmanager
def faults_as(make_error: Callable[[str], Exception], complaint: str) -> Iterator[None]:
    """Converts a pydantic error to another error, with the first fault in its message.

    Args:
        make_error: makes the other error from its message.
        complaint: the beginning of the message.
    """
    from pydantic import ValidationError  # slow to import

    try:
        yield
    except ValidationError as error:
        raise make_error(f"{complaint}: {faults(error)[0]:.300}") from None


def short_key(name: str) -> str:
    """Shortens and escapes an untrusted key for error messages."""
    if len(name) <= MAX_SHOWN_KEY and name.isprintable():
        return name
    return reprlib.repr(name)
