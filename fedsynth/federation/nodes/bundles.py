"""Several frames as one message: what a server asks of a node at once, and the answers.

A message to a node costs seconds, whatever is in it, so that a round is one message an exchange:
the client is told the terms where it was not yet, prepares, begins, takes its step, and says what
the round's row and the report need. It answers frames in order, up to the first that it does not
answer (`fedsynth.core.frames`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fedsynth.core.messages import LENGTH_BYTES
from fedsynth.errors import MessageError

MOST_FRAMES = 16


def pack(frames: Sequence[bytes]) -> bytes:
    """Frames as one message.

    >>> unpack(pack([b"one", b""]))
    [b'one', b'']
    """
    parts = [len(frames).to_bytes(LENGTH_BYTES, "little")]
    for frame in frames:
        parts += [len(frame).to_bytes(LENGTH_BYTES, "little"), frame]
    return b"".join(parts)


def unpack(sent: bytes) -> list[bytes]:
    """The frames of a message.

    Raises:
        MessageError: the bytes are none.
    """
    count = int.from_bytes(sent[:LENGTH_BYTES], "little")
    if len(sent) < LENGTH_BYTES or not 1 <= count <= MOST_FRAMES:
        raise MessageError("these bytes are no frames of fedsynth")
    frames = []
    position = LENGTH_BYTES
    for _ in range(count):
        end = position + LENGTH_BYTES
        length = int.from_bytes(sent[position:end], "little")
        if end > len(sent) or length > len(sent) - end:
            raise MessageError("these bytes are no frames of fedsynth: they are cut off")
        frames.append(sent[end : end + length])
        position = end + length
    if position != len(sent):
        raise MessageError("these bytes are no frames of fedsynth: there are more than they say")
    return frames
