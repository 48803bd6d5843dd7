"""Parsing of what nodes answer, which is untrusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedsynth.core.frames import Frame, parse_nonnegative_int
from fedsynth.core.uploads import LARGEST
from fedsynth.errors import MessageError
from fedsynth.federation.exchange.protocol import Evaluated
from fedsynth.privacy.history import History


def parse_reply(frame: Frame) -> Frame:
    """Returns an answer or a refusal as it is.

    Raises:
        MessageError: it is an error.
    """
    if frame.kind not in ("answer", "refusal"):
        raise MessageError(f"answers with an error: {frame.facts.get('text')!s:.200}")
    return frame


def parse_history(stated: Any) -> History | None:
    """Returns a client's statement of its ledger; None: it has none.

    Raises:
        MessageError: it is damaged.
    """
    if stated is None:
        return None
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"a client's history is damaged: {error!r:.80}") from None


def parse_evaluation(
    client: int, models: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> Evaluated:
    """Returns how models do on a client's test split, by its answers for each.

    Raises:
        MessageError, LookupError, TypeError: they are damaged.
    """
    size = parse_nonnegative_int(answers[0]["size"], "size")
    tested = parse_nonnegative_int(answers[0]["tested"], "count")
    right: dict[str, int] = {}
    for name, answer in zip(models, answers, strict=True):
        right[name] = parse_nonnegative_int(answer["right"]["model"], "count")
        if right[name] > tested:
            raise MessageError(f"{right[name]} of {tested} are right")
    return Evaluated(client, size, tested, right)


def majority_schema(stated: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Returns the facts that a method can merge: those with the names that most clients have.

    Facts are finite numbers by name, or mappings of such by name.
    """
    schemas = {position: form for position, one in enumerate(stated) if (form := _schema(one))}
    most = Counter(schemas.values()).most_common(1)
    return [stated[position] for position, form in schemas.items() if form == most[0][0]]


def _schema(value: Any, depth: int = 2) -> str:
    """Returns the names in a client's facts; empty: there are none, or they are unsound."""
    if not isinstance(value, dict) or not depth:
        return ""
    parts = []
    for name, one in sorted(value.items()):
        number = type(one) in (int, float) and abs(one) <= LARGEST
        inner = "" if number else _schema(one, depth - 1)
        if not (number or inner):
            return ""
        parts.append(f"{name!r}:{inner}")
    return f"{{{','.join(parts)}}}" if parts else ""
