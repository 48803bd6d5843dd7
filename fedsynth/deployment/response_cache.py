"""A node's last answers, as files: a server that repeats exactly the same question, because it lost
the answer or resumed from its checkpoint, gets the same bytes.

A repeated answer computes, draws and charges nothing, and releases nothing new. Any other question
is a new one and is charged as such.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from fedsynth.deployment.frames import Frame
from fedsynth.deployment.secure_exchange import QUESTIONS
from fedsynth.errors import CheckpointError, MessageError
from fedsynth.privacy.files import MAX_TENSORS_BYTES, read_regular, write_whole
from fedsynth.privacy.plans import PHASES

HASH_BYTES = 32
KEPT_ROUNDS = 2
"""The number of rounds whose answers are kept: a resumed server lacks only the last one."""
MOST_ROUNDS = 10**9  # a round number from a server, which becomes part of a file name
_NAME = re.compile(r"answer-([0-9]+)-([a-z]+)-([a-z]+)")


class KeptAnswers:
    """The stored answers of one client of a run.

    Args:
        folder: the client's folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, question: Frame) -> Frame | None:
        """Returns the stored answer to this question; None: it was not asked before.

        Raises:
            CheckpointError: the file is damaged, so that the answer cannot be repeated.
        """
        file = self._file(question)
        if file is None or not file.is_file():
            return None
        content = read_regular(file, MAX_TENSORS_BYTES)
        if content[:HASH_BYTES] != _question(question):
            return None
        answer = content[2 * HASH_BYTES :]
        try:
            if hashlib.sha256(answer).digest() != content[HASH_BYTES : 2 * HASH_BYTES]:
                raise MessageError("its hash is another")
            return Frame.from_bytes(answer)
        except MessageError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from None

    def keep(self, question: Frame, answer: Frame) -> None:
        """Stores an answer; refusals and errors are not stored.

        Raises:
            OSError: it cannot be written.
        """
        file = self._file(question)
        if file is None or answer.kind != "answer":
            return
        sent = answer.to_bytes()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = _question(question) + hashlib.sha256(sent).digest() + sent
        write_whole(file, content, secret=True)

    def has(self, number: Any, *phases: str) -> bool:
        """Returns whether the step of one of these exchanges of a round is stored."""
        if type(number) is not int or not 0 < number < MOST_ROUNDS:
            return False
        names = [f"answer-{number}-{phase}-step" for phase in phases]
        return any((self._folder / name).is_file() for name in names)

    def prune(self) -> None:
        """Removes the answers of all but the last rounds."""
        matches = [_NAME.fullmatch(path.name) for path in self._folder.glob("answer-*")]
        rounds = {int(match[1]) for match in matches if match is not None}
        old = set(sorted(rounds)[:-KEPT_ROUNDS])
        for match in matches:
            if match is not None and int(match[1]) in old:
                (self._folder / match[0]).unlink(missing_ok=True)

    def _file(self, question: Frame) -> Path | None:
        """Returns the path of the answer to such a question; None: such answers are not stored."""
        number = question.facts.get("round")
        phase = question.facts.get("phase")
        if question.kind not in QUESTIONS or phase not in PHASES:
            return None
        if type(number) is not int or not 0 < number < MOST_ROUNDS:
            return None
        return self._folder / f"answer-{number}-{phase}-{question.kind}"


def _question(question: Frame) -> bytes:
    """Returns a hash of the whole question except its number."""
    facts = {name: value for name, value in question.facts.items() if name != "number"}
    text = json.dumps([question.kind, facts], sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + question.payload).digest()
