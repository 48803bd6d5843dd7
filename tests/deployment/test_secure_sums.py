"""Tests of secure sums: the server learns the sum of the remaining clients and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.client import (
    Identities,
    SumClient,
    SumTerms,
    read_identities,
)
from fedsynth.deployment.secure_aggregation.primitives import Keys, Present, Roster, Sealed, Shares
from fedsynth.deployment.secure_aggregation.server import SumServer
from fedsynth.privacy.randomness import Grid, finest
from tests.privacy.test_files import private_pem, public_pem
from tests.raising import raises

LENGTH = 50
OTHER_KEY = primitives.public(bytes(range(32)))
Clients = frozenset[int]


def mask(client: SumClient, vector: primitives.IntVector, received: Sealed) -> primitives.IntVector:
    client.receive(received)
    return client.mask(vector)


def make_identities(folder: Path, clients: int) -> list[Identities]:
    """Returns each client's identities, as read from `--identity` and `--identities`."""
    (folder / "identities").mkdir()
    for k in range(clients):
        key = Ed25519PrivateKey.generate()
        (folder / f"own-{k}.pem").write_bytes(private_pem(key))
        (folder / "identities" / f"client-{k:03d}.pem").write_bytes(public_pem(key))
    return [read_identities(folder / f"own-{k}.pem", folder / "identities") for k in range(clients)]


@dataclass
class SumRun:
    """A secure sum with clients lost before each exchange and messages that may be altered."""

    clients: int = 5
    threshold: int = 4
    no_keys: Clients = frozenset()
    no_shares: Clients = frozenset()
    no_vector: Clients = frozenset()
    no_answer: Clients = frozenset()
    transmit: Callable[[Any, int], Any] = lambda parcel, client: parcel

    def __post_init__(self) -> None:
        self.form = primitives.FixedPoint(Grid(bits=24, bound=10.0))
        vectors = np.random.default_rng(3).uniform(-10, 10, (self.clients, LENGTH))
        self.vectors = dict(enumerate(vectors))
        self.terms = SumTerms(secrets.token_bytes(8), self.threshold, tuple(self.vectors), LENGTH)
        self.server = SumServer(self.terms)

    def sum(self) -> np.ndarray[Any, Any]:
        """Runs all four exchanges, with messages as bytes."""
        active = set(range(self.clients)) - self.no_keys
        self.sum_clients = clients = {k: SumClient.begin(k, self.terms) for k in active}
        keys = {k: self._sent(client.keys(), k) for k, client in clients.items()}
        roster = self.server.roster(keys)
        active -= self.no_shares
        sealed = {k: self._sent(clients[k].share(self._sent(roster, k)), k) for k in sorted(active)}
        received = self.server.relay(sealed)
        active -= self.no_vector
        masked = {}
        for k in sorted(active):
            words = self.form.encode(self.vectors[k])
            masked[k] = self._sent(mask(clients[k], words, self._sent(received[k], k)), k)
        present = self.server.present(masked)
        active -= self.no_answer
        shares = {k: self._sent(clients[k].unmask(self._sent(present, k)), k) for k in active}
        return self.form.decode(self.server.sum(shares))

    def _sent(self, message: primitives.Parcel | primitives.IntVector, client: int) -> Any:
        altered = self.transmit(message, client)
        if isinstance(altered, np.ndarray):
            return primitives.to_vector(altered.tobytes())
        return type(altered).from_bytes(altered.to_bytes())

    def expected(self, clients: set[int]) -> np.ndarray[Any, Any]:
        return np.array(sum(self.vectors[k] for k in sorted(clients)))


@pytest.mark.parametrize("exchange", ["no_keys", "no_shares", "no_vector", "no_answer"])
@pytest.mark.parametrize(("clients", "threshold"), [(2, 2), (3, 2), (5, 4), (7, 4)])
def test_sum_contains_all_received_vectors(exchange: str, clients: int, threshold: int) -> None:
    """Clients may be lost before any exchange while the threshold is met."""
    for lost in range(clients - threshold + 2):
        run = SumRun(clients, threshold, **{exchange: frozenset(range(lost))})
        if clients - lost < threshold:
            with raises(primitives.SecureSumError, "sums.clients"):
                run.sum()
            continue
        counted = set(range(0 if exchange == "no_answer" else lost, clients))
        np.testing.assert_allclose(run.sum(), run.expected(counted), atol=clients * 2.0**-25)


def test_server_receives_no_secrets_and_only_masked_vectors() -> None:
    """Covers a client lost after its shares; two sums of the same vectors have different words."""
    sent: list[bytes] = []

    def record(parcel: Any, client: int) -> Any:
        if isinstance(parcel, np.ndarray):
            sent.append(parcel.tobytes())
        elif isinstance(parcel, Keys | Sealed | Shares):
            sent.append(parcel.to_bytes())
        return parcel

    first, second = (SumRun(no_vector=frozenset({2}), transmit=record) for _ in range(2))
    for run in (first, second):
        np.testing.assert_allclose(run.sum(), run.expected({0, 1, 3, 4}), atol=2e-7)
    received = b"".join(sent)
    assert set(vars(first.server)) == {"terms", "_keys", "_sealed", "masked", "rejected"}
    for number, client in first.sum_clients.items():
        secrets_of = [client.mask_key, client.channel_key]
        if number == 2:  # the server gets the seeds of the remaining clients
            secrets_of.append(client.seed)
        else:
            assert (first.server.masked[number] != second.server.masked[number]).all()
        for secret in secrets_of:
            assert secret not in received
            assert secret.hex().encode() not in received


def altered(keys: Keys, **fields: Any) -> Keys:
    return keys.model_copy(update=fields)


# Changes of a message from or to client 1.
ALTERED: dict[type, Callable[[Any], Any]] = {
    Keys: lambda sent: altered(sent, commitment=bytes(32)),
    Sealed: lambda sent: Sealed(of={k: v[:-1] + bytes([v[-1] ^ 1]) for k, v in sent.of.items()}),
    # the server could alter the sum itself
    np.ndarray: lambda sent: sent[:-1],
    Present: lambda sent: Present(clients=(0, 1)),
    Shares: lambda sent: Shares(seeds={k: bytes(66) for k in sent.seeds}, keys=sent.keys),
    Roster: lambda sent: Roster(keys={**sent.keys, 0: altered(sent.keys[0], mask=OTHER_KEY)}),
}


@pytest.mark.parametrize("kind", ALTERED)
def test_altered_messages_raise_errors_or_leave_the_sum_masked(kind: type) -> None:
    def change(parcel: Any, client: int) -> Any:
        return ALTERED[kind](parcel) if (type(parcel), client) == (kind, 1) else parcel

    if kind is Roster:
        run = SumRun(transmit=change)
        error = run.sum() - run.expected(set(range(5)))
        assert np.median(np.abs(error)) > 1e9  # of 2^39, in fixed point with 24 bits
        return
    with pytest.raises(primitives.SecureSumError):
        SumRun(transmit=change, no_answer=frozenset({4})).sum()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda keys, _: {0: keys[0], 1: keys[1]}, "at least 3 of its 4"),
        (lambda keys, _: {**keys, 4: altered(keys[0], client=4)}, "at least 3 of its 4"),
        (lambda keys, _: {**keys, 1: altered(keys[1], mask=OTHER_KEY)}, "the keys of client 1"),
        (lambda keys, _: {**keys, 2: keys[0]}, "client 0 to client 2"),
        (lambda keys, _: {**keys, 2: altered(keys[0], client=2)}, "same key"),
        (
            lambda keys, _: {**keys, 2: altered(keys[2], channel=OTHER_KEY)},
            "client 2.s keys are not",
        ),
        (lambda keys, _: {**keys, 2: altered(keys[2], commitment=OTHER_KEY)}, "2.s keys are not"),
        (lambda keys, other_sum: {**other_sum, 1: keys[1]}, "client 0.s keys are not"),
    ],
)
def test_client_refuses_altered_rosters(tmp_path: Path, change: Any, reason: str) -> None:
    identities = make_identities(tmp_path, 4)
    runs = []
    for name in (b"one", b"other"):
        terms = SumTerms(name, 3, (0, 1, 2, 3), LENGTH)
        runs.append([SumClient.begin(k, terms) for k in range(4)])
    keys, other_sum = ({k: c.keys(identities[k]) for k, c in enumerate(run)} for run in runs)
    with pytest.raises(primitives.SecureSumError, match=reason):
        runs[0][1].share(Roster(keys=change(keys, other_sum)), identities[1])


def test_client_continues_only_in_the_same_sum() -> None:
    terms = SumTerms(b"one", threshold=3, clients=(0, 1, 2), length=2)
    client = SumClient.begin(1, terms)
    assert SumClient.stored(client.to_bytes(), 1, terms) == client
    for number, other in ((0, terms), (1, replace(terms, threshold=2))):
        with raises(primitives.SecureSumError, "sums.secure"):
            SumClient.stored(client.to_bytes(), number, other)


def start_sum(terms: SumTerms) -> tuple[SumServer, dict[int, SumClient], dict[int, Sealed]]:
    """Returns a server, its clients, and the ciphertexts that each of them sends."""
    server = SumServer(terms)
    clients = {k: SumClient.begin(k, terms) for k in terms.clients}
    roster = server.roster({k: client.keys() for k, client in clients.items()})
    return server, clients, {k: client.share(roster) for k, client in clients.items()}


def test_threshold_is_above_half() -> None:
    for threshold in (0, 1, 2, 6):
        with raises(primitives.SecureSumError, "sums.threshold"):
            SumTerms(b"one", threshold, (0, 1, 2, 3, 4), 3)


def test_clients_reveal_one_kind_of_share_and_only_if_all_honest_noise_is_summed() -> None:
    """H = 4 and a colluder: 4 of 6 are above half, but one of these may add no noise. A client
    refuses before its vector is masked and afterwards. It answers one request: a server that
    reports a client first as lost and then as present gets one kind of share."""
    terms = SumTerms(b"one", 5, (0, 1, 2, 3, 4, 5), 3)
    server, clients, sealed = start_sum(terms)
    few = {k: ciphertext for k, ciphertext in server.relay(sealed)[0].of.items() if k < 4}
    with raises(primitives.SecureSumError, "sums.shares"):
        mask(clients[0], np.zeros(3, np.uint64), Sealed(of=few))
    server, clients, sealed = start_sum(terms)
    for k, received in server.relay(sealed).items():
        mask(clients[k], np.zeros(3, np.uint64), received)
    with raises(primitives.SecureSumError, "sums.survivors"):
        clients[0].unmask(Present(clients=(0, 1, 2, 3)))
    shares = clients[1].unmask(Present(clients=(0, 1, 2, 3, 4)))
    assert (set(shares.seeds), set(shares.keys)) == ({0, 1, 2, 3, 4}, {5})
    with pytest.raises(primitives.SecureSumError, match="expected request"):
        clients[1].unmask(Present(clients=(0, 1, 2, 3, 4, 5)))
    with pytest.raises(primitives.SecureSumError, match="client 2 for secret shares"):
        clients[2].unmask(Present(clients=(0, 1, 3, 4, 5)))


def test_incomplete_shares_are_refused() -> None:
    """Masks of only one side would not cancel, and the sum would be silently wrong."""
    server, _, sealed = start_sum(SumTerms(b"one", 2, (0, 1, 2), LENGTH))
    sealed[0] = Sealed(of={1: sealed[0].of[1]})
    assert set(server.relay(sealed)) == {1, 2}
    assert server.rejected == {0: "the client sent invalid shares"}
    with raises(primitives.SecureSumError, "sums.clients"):
        server.relay({**sealed, 1: sealed[0]})


# ---------------------------------------------------------------------------------- primitives


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.data())
def test_shares_reconstruct_the_secret(secret: bytes, threshold: int, data: st.DataObject) -> None:
    holders = data.draw(st.lists(st.integers(0, 50), min_size=threshold, max_size=8, unique=True))
    shares = primitives.split(secret, holders, threshold)
    chosen = data.draw(st.permutations(holders))[:threshold]
    assert primitives.combine({k: shares[k] for k in chosen}, threshold) == secret
    with raises(primitives.SecureSumError, "sums.secure"):
        primitives.combine({k: shares[k] for k in chosen[1:]}, threshold)


def test_shares_are_values_of_a_random_polynomial() -> None:
    """Three values determine a fourth by Lagrange's formula, and two do not."""
    values = primitives.split(bytes(32), [0, 1, 2, 3], 3).values()
    shares = [int.from_bytes(value, "big") for value in values]
    assert (shares[3] - 3 * shares[2] + 3 * shares[1] - shares[0]) % primitives.PRIME == 0
    assert (shares[2] - 2 * shares[1] + shares[0]) % primitives.PRIME != 0
    assert primitives.split(bytes(32), [0, 1, 2], 3) != primitives.split(bytes(32), [0, 1, 2], 3)


@given(
    st.lists(st.floats(-1, 1), max_size=20),
    st.integers(1, 10**6),
    st.sampled_from([1e-9, 1.0, 100.0, 2.0**37, 1e300]),
)
def test_sums_are_exact_to_half_a_spacing(shares: list[float], clients: int, bound: float) -> None:
    form = primitives.FixedPoint(finest(bound, clients))
    values = bound * np.array([1.0, *shares])
    total = form.decode(form.encode(values) * np.uint64(clients))
    np.testing.assert_allclose(
        total, clients * values, rtol=1e-12, atol=clients * form.grid.spacing / 2
    )


def test_masks_are_chacha20s_key_stream() -> None:
    """RFC 8439, Appendix A.1, test vector 1: key and nonce zero, counter zero."""
    words = primitives.mask(bytes(32), 8)
    assert words.astype("<u8").tobytes().hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")


@given(st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=5), st.integers(0, 40))
def test_private_words_wrap_modulo_2_64(values: list[float], fraction: int) -> None:
    """Compares with Python's integers: a refusal would reveal a property of a vector."""
    form = primitives.FixedPoint(Grid(bits=fraction, bound=1.0), wraps=True)
    expected = [round(value * 2**fraction) % 2**64 for value in map(Fraction, values)]
    assert [int(word) for word in form.encode(values)] == expected
    for odd in (*(value for value in values if abs(value) > 1), np.nan, np.inf):
        with raises(primitives.SecureSumError, "sums.secure"):
            replace(form, wraps=False).encode([0.0, odd])
