"""Tests of secure sums: the server learns the sum of the remaining clients and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.client import (
    Identities,
    SumClient,
    SumTerms,
)
from fedsynth.deployment.secure_aggregation.primitives import (
    PRIME,
    FixedPoint,
    IntVector,
    Keys,
    Masked,
    Parcel,
    Present,
    Roster,
    Sealed,
    SecureSumError,
    Shares,
    combine,
    split,
)
from fedsynth.deployment.secure_aggregation.server import SumServer

LENGTH = 50
OTHER_KEY = primitives.public(primitives.key_of(bytes(range(32))))
Clients = frozenset[int]


def mask(client: SumClient, vector: IntVector, received: Sealed) -> Masked:
    client.receive(received)
    return client.mask(vector)


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
        self.form = FixedPoint(bound=10.0, clients=self.clients)
        vectors = np.random.default_rng(3).uniform(-10, 10, (self.clients, LENGTH))
        self.vectors = dict(enumerate(vectors))
        self.terms = SumTerms(secrets.token_bytes(8), self.threshold, self.clients, LENGTH)
        self.server = SumServer(self.terms)

    def sum(self) -> np.ndarray[Any, Any]:
        """Runs all four exchanges, with messages as bytes."""
        active = set(range(self.clients)) - self.no_keys
        self.sum_clients = clients = {k: SumClient(k, self.terms) for k in active}
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

    def _sent(self, parcel: Parcel, client: int) -> Any:
        altered = self.transmit(parcel, client)
        return type(altered).from_bytes(altered.to_bytes())

    def expected(self, clients: set[int]) -> np.ndarray[Any, Any]:
        return np.array(sum(self.vectors[k] for k in sorted(clients)))


@pytest.mark.parametrize("exchange", ["no_keys", "no_shares", "no_vector", "no_answer"])
def test_sum_contains_all_received_vectors(exchange: str) -> None:
    """Clients may be lost before any exchange while the threshold is met."""
    for lost in range(3):
        run = SumRun(**{exchange: frozenset(range(lost))})
        counted = set(range(5)) if exchange == "no_answer" else set(range(lost, 5))
        if lost < 2:
            np.testing.assert_allclose(run.sum(), run.expected(counted), atol=5 * 2.0**-25)
            continue
        with pytest.raises(SecureSumError, match="of 4 clients, got 3"):
            run.sum()


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 7), st.data())
def test_any_clients_above_the_threshold_may_be_lost(clients: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(clients // 2 + 1, clients))
    lost = data.draw(st.sets(st.integers(0, clients - 1), max_size=clients - threshold))
    run = SumRun(clients, threshold, no_vector=frozenset(lost))
    active = set(range(clients)) - lost
    np.testing.assert_allclose(run.sum(), run.expected(active), atol=clients * 2.0**-25)


def test_server_receives_no_secrets_and_only_masked_vectors() -> None:
    """Checks a client that is lost after its shares and the remaining ones; two sums of the same
    vectors have different words."""
    sent: list[bytes] = []

    def record(parcel: Any, client: int) -> Any:
        if isinstance(parcel, Keys | Sealed | Masked | Shares):
            sent.append(parcel.to_bytes())
        return parcel

    first, second = (SumRun(no_vector=frozenset({2}), transmit=record) for _ in range(2))
    for run in (first, second):
        np.testing.assert_allclose(run.sum(), run.expected({0, 1, 3, 4}), atol=2e-7)
    received = b"".join(sent)
    assert set(vars(first.server)) == {"terms", "_keys", "_sealed", "masked", "rejected"}
    for number, client in first.sum_clients.items():
        secrets_of = [client._mask_key.private_bytes_raw(), client._channel_key.private_bytes_raw()]
        if number == 2:  # the server gets the seeds of the remaining clients
            secrets_of.append(client.state.seed)
        else:
            assert (first.server.masked[number] != second.server.masked[number]).all()
        for secret in secrets_of:
            assert secret not in received
            assert secret.hex().encode() not in received


@pytest.mark.parametrize("kind", [Keys, Sealed, Masked, Present, Shares])
def test_altered_messages_raise_errors(kind: type[Parcel]) -> None:
    """Masked words are excepted: the server could alter the sum itself."""

    def change(parcel: Any, client: int) -> Any:
        if type(parcel) is not kind or client != 1:
            return parcel
        if isinstance(parcel, Keys):
            return parcel.model_copy(update={"commitment": bytes(32)})
        if isinstance(parcel, Sealed):
            return Sealed(of={k: box[:-1] + bytes([box[-1] ^ 1]) for k, box in parcel.of.items()})
        if isinstance(parcel, Masked):
            return Masked(parcel.vector[:-1])
        if isinstance(parcel, Present):
            return Present(clients=(0, 1))
        return Shares(seeds={k: bytes(66) for k in parcel.seeds}, keys=parcel.keys)

    run = SumRun(transmit=change, no_answer=frozenset({4}))
    with pytest.raises(SecureSumError):
        run.sum()


def test_replaced_mask_keys_leave_the_sum_masked() -> None:
    def change(parcel: Any, client: int) -> Any:
        if not isinstance(parcel, Roster) or client != 1:
            return parcel
        keys = dict(parcel.keys)
        keys[0] = keys[0].model_copy(update={"mask": OTHER_KEY})
        return Roster(keys=keys)

    run = SumRun(transmit=change)
    error = run.sum() - run.expected(set(range(5)))
    assert np.median(np.abs(error)) > 1e9  # of 2^39, in fixed point with 24 bits


def make_identities(clients: int) -> dict[int, Identities]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private_keys = {k: Ed25519PrivateKey.generate() for k in range(clients)}
    public_keys = {k: key.public_key() for k, key in private_keys.items()}
    return {k: Identities(private_keys[k], public_keys) for k in range(clients)}


def test_keys_signed_for_another_sum_are_refused() -> None:
    identities = make_identities(3)
    first, other = (SumTerms(name, 2, 3, 4) for name in (b"one", b"other"))
    old = {k: SumClient(k, first, identities[k]).keys() for k in (0, 2)}
    client = SumClient(1, other, identities[1])
    roster = Roster(keys={**old, 1: client.keys()})
    with pytest.raises(SecureSumError, match="are not signed"):
        client.share(roster)


def altered(keys: Keys, **fields: Any) -> Keys:
    return keys.model_copy(update=fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda keys: {0: keys[0], 1: keys[1]}, "at least 3 of 4 clients"),
        (lambda keys: {**keys, 4: altered(keys[0], client=4)}, "at least 3 of 4 clients"),
        (lambda keys: {**keys, 1: altered(keys[1], mask=OTHER_KEY)}, "keys of this client"),
        (lambda keys: {**keys, 2: keys[0]}, "another client for client 2"),
        (lambda keys: {**keys, 2: altered(keys[0], client=2)}, "same key"),
        (lambda keys: {**keys, 2: altered(keys[2], channel=OTHER_KEY)}, "client 2"),
        (lambda keys: {**keys, 2: altered(keys[2], commitment=OTHER_KEY)}, "client 2"),
    ],
)
def test_client_refuses_altered_rosters(
    change: Callable[[dict[int, Keys]], dict[int, Keys]], reason: str
) -> None:
    terms = SumTerms(b"one", 3, 4, LENGTH)
    clients = {k: SumClient(k, terms, client) for k, client in make_identities(4).items()}
    keys = {k: client.keys() for k, client in clients.items()}
    with pytest.raises(SecureSumError, match=reason):
        clients[1].share(Roster(keys=change(keys)))


def test_client_continues_only_in_the_same_sum() -> None:
    terms = SumTerms(b"one", threshold=3, clients=3, length=2)
    state = SumClient(1, terms).state
    assert SumClient(1, terms, None, state).number == 1
    for number, other in ((0, terms), (1, replace(terms, threshold=2))):
        with pytest.raises(SecureSumError, match="another secure sum"):
            SumClient(number, other, None, state)


def start_sum(terms: SumTerms) -> tuple[SumServer, dict[int, SumClient], dict[int, Sealed]]:
    """Returns a server, its clients, and the ciphertexts that it relays to each of them."""
    server = SumServer(terms)
    clients = {k: SumClient(k, terms) for k in range(terms.clients)}
    roster = server.roster({k: client.keys() for k, client in clients.items()})
    return server, clients, server.relay({k: client.share(roster) for k, client in clients.items()})


def test_clients_never_reveal_both_shares_of_a_client() -> None:
    """A client answers one request and reveals one kind of share: a server that reports a client
    first as lost and then as present gets one kind."""
    _, clients, sealed = start_sum(SumTerms(b"one", threshold=2, clients=3, length=LENGTH))
    for k, client in clients.items():
        mask(client, np.zeros(LENGTH, np.uint64), sealed[k])
    shares = clients[0].unmask(Present(clients=(0, 1)))
    assert set(shares.seeds) == {0, 1}
    assert set(shares.keys) == {2}
    with pytest.raises(SecureSumError, match="out of order"):
        clients[0].unmask(Present(clients=(0, 1, 2)))
    with pytest.raises(SecureSumError, match="is missing"):
        clients[1].unmask(Present(clients=(0, 2)))


def test_threshold_is_above_half() -> None:
    for threshold in (0, 1, 2, 6):
        with pytest.raises(SecureSumError, match="above half"):
            SumTerms(b"one", threshold, 5, 3)


def test_sum_has_the_noise_of_all_honest_clients() -> None:
    """H = 4 and a colluder: 4 of 6 are above half, but one of these may add no noise. A client
    refuses before its vector is masked and afterwards."""
    terms = SumTerms(b"one", 5, 6, 3)
    vector = np.zeros(3, np.uint64)
    _, clients, passed = start_sum(terms)
    few = Sealed(of={k: ciphertext for k, ciphertext in passed[0].of.items() if k < 4})
    with pytest.raises(SecureSumError, match="got 4"):
        mask(clients[0], vector, few)
    _, clients, passed = start_sum(terms)
    for k, ciphertext in clients.items():
        mask(ciphertext, vector, passed[k])
    with pytest.raises(SecureSumError, match="got 4"):
        clients[0].unmask(Present(clients=(0, 1, 2, 3)))
    assert set(clients[1].unmask(Present(clients=(0, 1, 2, 3, 4))).keys) == {5}


def test_incomplete_shares_are_refused() -> None:
    """Masks of only one side would not cancel, and the sum would be silently wrong."""
    run = SumRun(clients=3, threshold=2)
    clients = {k: SumClient(k, run.terms) for k in range(3)}
    roster = run.server.roster({k: client.keys() for k, client in clients.items()})
    sealed = {k: client.share(roster) for k, client in clients.items()}
    sealed[0] = Sealed(of={1: sealed[0].of[1]})
    assert set(run.server.relay(sealed)) == {1, 2}
    assert run.server.rejected == {0: "the client sent invalid shares"}
    with pytest.raises(SecureSumError, match=r"needs shares of .* clients, got 1"):
        run.server.relay({**sealed, 1: sealed[0]})


# ---------------------------------------------------------------------------------- primitives


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.data())
def test_threshold_shares_reconstruct_the_secret(
    secret: bytes, threshold: int, data: st.DataObject
) -> None:
    holders = data.draw(st.lists(st.integers(0, 50), min_size=threshold, max_size=8, unique=True))
    shares = split(secret, holders, threshold)
    chosen = data.draw(st.permutations(holders))[:threshold]
    assert combine({k: shares[k] for k in chosen}, threshold) == secret
    with pytest.raises(SecureSumError, match="needs at least"):
        combine({k: shares[k] for k in chosen[1:]}, threshold)


def test_shares_are_values_of_a_random_polynomial() -> None:
    """Three values determine a fourth by Lagrange's formula, and two do not."""
    shares = [int.from_bytes(v, "big") for v in split(bytes(32), [0, 1, 2, 3], 3).values()]
    assert (shares[3] - 3 * shares[2] + 3 * shares[1] - shares[0]) % PRIME == 0
    assert (shares[2] - 2 * shares[1] + shares[0]) % PRIME != 0
    assert split(bytes(32), [0, 1, 2], 3) != split(bytes(32), [0, 1, 2], 3)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.integers(1, 5))
def test_fixed_point_sums_are_exact_to_a_bit(values: list[float], clients: int) -> None:
    form = FixedPoint(100.0, clients)
    words: IntVector = form.encode(values)
    total = sum([words] * (clients - 1), start=words)
    np.testing.assert_allclose(
        form.decode(total), clients * np.array(values), atol=clients * 2.0**-25
    )


def test_values_out_of_range_are_refused() -> None:
    for value in (float("nan"), float("inf"), 10.5, -11.0):
        with pytest.raises(SecureSumError, match="must be finite and within"):
            FixedPoint(10.0, 3).encode([0.0, value])


def test_overflowing_fixed_point_formats_are_refused() -> None:
    with pytest.raises(SecureSumError, match="overflows"):
        FixedPoint(2.0**40, 3, fraction=24)
    form = FixedPoint(2.0**37, 3, fraction=24)
    total = form.encode([2.0**37]) * np.uint64(3)
    assert form.decode(total)[0] == 3 * 2.0**37


def test_masks_are_chacha20s_key_stream() -> None:
    """RFC 8439, Appendix A.1, test vector 1: key and nonce zero, counter zero."""
    words = primitives.mask(bytes(32), 8)
    assert words.astype("<u8").tobytes().hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")


@given(st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=5), st.integers(0, 40))
def test_private_words_wrap_modulo_2_64(values: list[float], fraction: int) -> None:
    """Compares with Python's integers: a refusal would reveal a property of a vector."""
    form = FixedPoint(bound=1.0, clients=2, fraction=fraction, wraps=True)
    expected = [round(value * 2**fraction) % 2**64 for value in map(Fraction, values)]
    assert [int(word) for word in form.encode(values)] == expected
    if any(abs(value) > 1 for value in values):
        with pytest.raises(SecureSumError, match="must be finite and within"):
            replace(form, wraps=False).encode(values)
