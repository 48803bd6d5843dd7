"""After which rounds a plan states ε, and ε there, computed when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

ALL_SHOWN = 1000
"""Up to so many rounds a plan states ε after each."""


def shown_rounds(rounds: int) -> tuple[int, ...]:
    """After which rounds a plan of so many states ε, ascending; a public choice.

    All of them up to `ALL_SHOWN`. Of more: 1, 2, 5, 10, 20, 50, …, every fifth part of the run, and
    the last.
    """
    if rounds <= ALL_SHOWN:
        return tuple(range(1, rounds + 1))
    ladder = {step * 10**k for k in range(len(str(rounds))) for step in (1, 2, 5)}
    fifths = range(rounds // 5, rounds, rounds // 5)
    return tuple(sorted({*(n for n in ladder if n < rounds), *fifths, rounds}))


class PlannedEpsilon(Mapping[int, float]):
    """From the number of a round to ε after it.

    A value costs a composition, up to a second with subsampling, so each is computed when it is
    first looked at.

    Args:
        rounds: the rounds that it has, ascending.
        after: from a position in `rounds` to ε.
    """

    def __init__(self, rounds: Sequence[int], after: Callable[[int], float]) -> None:
        self._position = {number: position for position, number in enumerate(rounds)}
        self._after = after
        self._known: dict[int, float] = {}

    def __getitem__(self, number: int) -> float:
        position = self._position[number]
        if number not in self._known:
            self._known[number] = self._after(position)
        return self._known[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._position)

    def __len__(self) -> int:
        return len(self._position)
