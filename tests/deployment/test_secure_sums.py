"""Secure sums: the server gets the sum of those that are there, and nothing else of anybody."""

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
MY_KEY = primitives.public(primitives.key_of(bytes(range(32))))
Gone = frozenset[int]


def masked_by(client: SumClient, vector: IntVector, received: Sealed) -> Masked:
    client.receive(received)
    return client.mask(vector)


@dataclass
class Played:
    """One sum, with who is lost before each exchange, and what may be changed on the way."""

    clients: int = 5
    threshold: int = 4
    no_keys: Gone = frozenset()
    no_shares: Gone = frozenset()
    no_vector: Gone = frozenset()
    no_answer: Gone = frozenset()
    on_the_way: Callable[[Any, int], Any] = lambda parcel, client: parcel

    def __post_init__(self) -> None:
        self.form = FixedPoint(bound=10.0, clients=self.clients)
        drawn = np.random.default_rng(3).uniform(-10, 10, (self.clients, LENGTH))
        self.vectors = dict(enumerate(drawn))
        self.terms = SumTerms(secrets.token_bytes(8), self.threshold, self.clients, LENGTH)
        self.server = SumServer(self.terms)

    def sum(self) -> np.ndarray[Any, Any]:
        """All four exchanges, as bytes."""
        there = set(range(self.clients)) - self.no_keys
        self.made = clients = {k: SumClient(k, self.terms) for k in there}
        keys = {k: self._sent(one.keys(), k) for k, one in clients.items()}
        roster = self.server.roster(keys)
        there -= self.no_shares
        sealed = {k: self._sent(clients[k].share(self._sent(roster, k)), k) for k in sorted(there)}
        received = self.server.relay(sealed)
        there -= self.no_vector
        masked = {}
        for k in sorted(there):
            words = self.form.encode(self.vectors[k])
            masked[k] = self._sent(masked_by(clients[k], words, self._sent(received[k], k)), k)
        present = self.server.present(masked)
        there -= self.no_answer
        shares = {k: self._sent(clients[k].unmask(self._sent(present, k)), k) for k in there}
        return self.form.decode(self.server.sum(shares))

    def _sent(self, parcel: Parcel, client: int) -> Any:
        changed = self.on_the_way(parcel, client)
        return type(changed).from_bytes(changed.to_bytes())

    def expected(self, clients: set[int]) -> np.ndarray[Any, Any]:
        return np.array(sum(self.vectors[k] for k in sorted(clients)))


@pytest.mark.parametrize("when", ["no_keys", "no_shares", "no_vector", "no_answer"])
def test_the_sum_has_all_received_vectors(when: str) -> None:
    """Whoever is lost, and whenever: as long as the threshold is there."""
    for lost in range(3):
        played = Played(**{when: frozenset(range(lost))})
        counted = set(range(5)) if when == "no_answer" else set(range(lost, 5))
        if lost < 2:
            np.testing.assert_allclose(played.sum(), played.expected(counted), atol=5 * 2.0**-25)
            continue
        with pytest.raises(SecureSumError, match="of 4 clients, got 3"):
            played.sum()


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 7), st.data())
def test_any_clients_lost_above_the_threshold(clients: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(clients // 2 + 1, clients))
    gone = data.draw(st.sets(st.integers(0, clients - 1), max_size=clients - threshold))
    played = Played(clients, threshold, no_vector=frozenset(gone))
    there = set(range(clients)) - gone
    np.testing.assert_allclose(played.sum(), played.expected(there), atol=clients * 2.0**-25)


def test_a_server_is_sent_no_secret_and_no_word_of_a_vector() -> None:
    """Of a client that is lost after its shares, and of those that stay; the same vectors twice
    are other words, whose masks are even bits."""
    sent: list[bytes] = []

    def look(parcel: Any, client: int) -> Any:
        if isinstance(parcel, Keys | Sealed | Masked | Shares):
            sent.append(parcel.to_bytes())
        return parcel

    first, second = (Played(no_vector=frozenset({2}), on_the_way=look) for _ in range(2))
    for played in (first, second):
        np.testing.assert_allclose(played.sum(), played.expected({0, 1, 3, 4}), atol=2e-7)
    everything = b"".join(sent)
    assert set(vars(first.server)) == {"terms", "_keys", "_sealed", "masked", "rejected"}
    for number, client in first.made.items():
        secrets_of = [client._mask_key.private_bytes_raw(), client._channel_key.private_bytes_raw()]
        if number == 2:  # of those that are there it gets the seed
            secrets_of.append(client.state.seed)
        else:
            assert (first.server.masked[number] != second.server.masked[number]).all()
        for secret in secrets_of:
            assert secret not in everything
            assert secret.hex().encode() not in everything


@pytest.mark.parametrize("kind", [Keys, Sealed, Masked, Present, Shares])
def test_what_was_changed_on_the_way_gives_no_sum(kind: type[Parcel]) -> None:
    """But for the numbers in masked words, which the server could change in the sum as well."""

    def change(parcel: Any, client: int) -> Any:
        if type(parcel) is not kind or client != 1:
            return parcel
        if isinstance(parcel, Keys):
            return parcel.model_copy(update={"commitment": bytes(32)})
        if isinstance(parcel, Sealed):
            return Sealed(of={k: one[:-1] + bytes([one[-1] ^ 1]) for k, one in parcel.of.items()})
        if isinstance(parcel, Masked):
            return Masked(parcel.vector[:-1])
        if isinstance(parcel, Present):
            return Present(clients=(0, 1))
        return Shares(seeds={k: bytes(66) for k in parcel.seeds}, keys=parcel.keys)

    played = Played(on_the_way=change, no_answer=frozenset({4}))
    with pytest.raises(SecureSumError):
        played.sum()


def test_a_mask_key_in_anothers_place_gives_noise_and_no_vector() -> None:
    def change(parcel: Any, client: int) -> Any:
        if not isinstance(parcel, Roster) or client != 1:
            return parcel
        others = dict(parcel.keys)
        others[0] = others[0].model_copy(update={"mask": MY_KEY})
        return Roster(keys=others)

    played = Played(on_the_way=change)
    wrong = played.sum() - played.expected(set(range(5)))
    assert np.median(np.abs(wrong)) > 1e9  # of 2^39, in fixed point with 24 bits


def with_identities(clients: int) -> dict[int, Identities]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    own = {k: Ed25519PrivateKey.generate() for k in range(clients)}
    public = {k: key.public_key() for k, key in own.items()}
    return {k: Identities(own[k], public) for k in range(clients)}


def test_keys_that_were_signed_for_another_sum_are_refused() -> None:
    identities = with_identities(3)
    first, other = (SumTerms(name, 2, 3, 4) for name in (b"one", b"other"))
    old = {k: SumClient(k, first, identities[k]).keys() for k in (0, 2)}
    client = SumClient(1, other, identities[1])
    roster = Roster(keys={**old, 1: client.keys()})
    with pytest.raises(SecureSumError, match="are not signed"):
        client.share(roster)


def changed(keys: Keys, **fields: Any) -> Keys:
    return keys.model_copy(update=fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda keys: {0: keys[0], 1: keys[1]}, "at least 3 of 4 clients"),
        (lambda keys: {**keys, 4: changed(keys[0], client=4)}, "at least 3 of 4 clients"),
        (lambda keys: {**keys, 1: changed(keys[1], mask=MY_KEY)}, "keys of this client"),
        (lambda keys: {**keys, 2: keys[0]}, "another client for client 2"),
        (lambda keys: {**keys, 2: changed(keys[0], client=2)}, "same key"),
        (lambda keys: {**keys, 2: changed(keys[2], channel=MY_KEY)}, "client 2"),
        (lambda keys: {**keys, 2: changed(keys[2], commitment=MY_KEY)}, "client 2"),
    ],
)
def test_a_client_refuses_a_roster_that_the_server_has_changed(
    change: Callable[[dict[int, Keys]], dict[int, Keys]], reason: str
) -> None:
    terms = SumTerms(b"one", 3, 4, LENGTH)
    clients = {k: SumClient(k, terms, one) for k, one in with_identities(4).items()}
    keys = {k: one.keys() for k, one in clients.items()}
    with pytest.raises(SecureSumError, match=reason):
        clients[1].share(Roster(keys=change(keys)))


def test_a_client_continues_only_in_the_same_sum() -> None:
    terms = SumTerms(b"one", threshold=3, clients=3, length=2)
    state = SumClient(1, terms).state
    assert SumClient(1, terms, None, state).number == 1
    for number, other in ((0, terms), (1, replace(terms, threshold=2))):
        with pytest.raises(SecureSumError, match="another secure sum"):
            SumClient(number, other, None, state)


def begun(terms: SumTerms) -> tuple[SumServer, dict[int, SumClient], dict[int, Sealed]]:
    """A server, its clients, and what it passes on to each of them."""
    server = SumServer(terms)
    clients = {k: SumClient(k, terms) for k in range(terms.clients)}
    roster = server.roster({k: client.keys() for k, client in clients.items()})
    return server, clients, server.relay({k: one.share(roster) for k, one in clients.items()})


def test_a_client_gives_never_both_shares_of_another_one() -> None:
    """Not for one question, and it answers one alone: a server that says first that a client is
    lost, and then that it is there, gets one kind."""
    _, clients, sealed = begun(SumTerms(b"one", threshold=2, clients=3, length=LENGTH))
    for k, client in clients.items():
        masked_by(client, np.zeros(LENGTH, np.uint64), sealed[k])
    given = clients[0].unmask(Present(clients=(0, 1)))
    assert set(given.seeds) == {0, 1}
    assert set(given.keys) == {2}
    with pytest.raises(SecureSumError, match="out of order"):
        clients[0].unmask(Present(clients=(0, 1, 2)))
    with pytest.raises(SecureSumError, match="is missing"):
        clients[1].unmask(Present(clients=(0, 2)))


def test_the_threshold_is_above_half() -> None:
    for threshold in (0, 1, 2, 6):
        with pytest.raises(SecureSumError, match="above half"):
            SumTerms(b"one", threshold, 5, 3)


def test_a_sum_has_the_noise_of_all_honest_clients() -> None:
    """H = 4 and a colluder: 4 of 6 are above the threshold, and one of these may bring no noise.
    A client refuses, whatever the server does, before its vector is masked and afterwards."""
    terms = SumTerms(b"one", 5, 6, 3)
    vector = np.zeros(3, np.uint64)
    _, found, passed = begun(terms)
    few = Sealed(of={k: one for k, one in passed[0].of.items() if k < 4})
    with pytest.raises(SecureSumError, match="got 4"):
        masked_by(found[0], vector, few)
    _, found, passed = begun(terms)
    for k, one in found.items():
        masked_by(one, vector, passed[k])
    with pytest.raises(SecureSumError, match="got 4"):
        found[0].unmask(Present(clients=(0, 1, 2, 3)))
    assert set(found[1].unmask(Present(clients=(0, 1, 2, 3, 4))).keys) == {5}


def test_a_share_for_an_unknown_client_is_refused() -> None:
    """Masks that one side alone has would not cancel, and the sum be wrong unseen."""
    played = Played(clients=3, threshold=2)
    clients = {k: SumClient(k, played.terms) for k in range(3)}
    roster = played.server.roster({k: one.keys() for k, one in clients.items()})
    sealed = {k: one.share(roster) for k, one in clients.items()}
    sealed[0] = Sealed(of={1: sealed[0].of[1]})
    assert set(played.server.relay(sealed)) == {1, 2}
    assert played.server.rejected == {0: "the client sent invalid shares"}
    with pytest.raises(SecureSumError, match=r"needs shares of .* clients, got 1"):
        played.server.relay({**sealed, 1: sealed[0]})


# ---------------------------------------------------------------------------------- its parts


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.data())
def test_shares_give_the_secret_from_the_threshold_on(
    secret: bytes, threshold: int, data: st.DataObject
) -> None:
    holders = data.draw(st.lists(st.integers(0, 50), min_size=threshold, max_size=8, unique=True))
    shares = split(secret, holders, threshold)
    some = data.draw(st.permutations(holders))[:threshold]
    assert combine({k: shares[k] for k in some}, threshold) == secret
    with pytest.raises(SecureSumError, match="needs at least"):
        combine({k: shares[k] for k in some[1:]}, threshold)


def test_shares_are_the_values_of_a_random_polynomial_of_the_thresholds_degree() -> None:
    """Three values give a fourth by Lagrange's formula, and two do not."""
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


def test_what_does_not_fit_is_refused_and_never_cut_off() -> None:
    for value in (float("nan"), float("inf"), 10.5, -11.0):
        with pytest.raises(SecureSumError, match="must be finite and within"):
            FixedPoint(10.0, 3).encode([0.0, value])


def test_a_form_that_would_overflow_is_refused() -> None:
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
def test_private_words_are_taken_modulo_2_64_and_never_refused(
    values: list[float], fraction: int
) -> None:
    """Beside Python's whole numbers: a refusal would tell of one vector."""
    form = FixedPoint(bound=1.0, clients=2, fraction=fraction, wraps=True)
    wanted = [round(value * 2**fraction) % 2**64 for value in map(Fraction, values)]
    assert [int(word) for word in form.encode(values)] == wanted
    if any(abs(value) > 1 for value in values):
        with pytest.raises(SecureSumError, match="must be finite and within"):
            replace(form, wraps=False).encode(values)
