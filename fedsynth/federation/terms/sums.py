"""How many clients a sum needs that nobody sees the parts of; all of it is public."""

from __future__ import annotations

import math

from fedsynth.core.method import Method
from fedsynth.errors import SettingError
from fedsynth.federation.terms.participation import active_clients
from fedsynth.federation.terms.settings import RunSettings


def fewest(method: Method, taking: int, clients: int, *, private: bool) -> int:
    """Of fewer clients' uploads there is no sum: a majority; and where noise is shared H beside
    one, who may be who looks, and knows its own noise.

    Args:
        method: one whose server sees sums alone.
        taking: the round's clients.
        clients: K.
        private: the run has differential privacy.
    """
    looking = 1 if private and clients > 1 else 0
    return max(taking // 2 + 1, method.noise_shares(clients) + looking)


def check_quorum(settings: RunSettings) -> None:
    """Refuses a quorum with which a round would count that has no sum.

    Raises:
        SettingError: says what to set.
    """
    taking = active_clients(settings.partition.clients, settings.participation)
    private = settings.privacy is not None
    least = fewest(settings.method, taking, settings.partition.clients, private=private)
    if least > taking:
        raise SettingError(
            "run",
            "participation",
            f"lets {taking} clients take part in a round, and a sum needs {least}",
            value=settings.participation,
        )
    if math.ceil(settings.quorum * taking - 1e-9) < least:
        enough = math.ceil(1000 * least / taking) / 1000
        raise SettingError(
            "run",
            "quorum",
            f"must be at least {enough:g}: a secure sum needs {least} of {taking} clients",
            value=settings.quorum,
        )
