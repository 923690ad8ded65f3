"""The protocol of secure aggregation: sums are exact, and masks and shares hide."""

from __future__ import annotations

import ast
import random
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from nouns import setting
from scipy.stats import chisquare
from secure_play import TYPES, Play, drawn, summed, vectors
from sympy import isprime, prevprime

from leakgauge.errors import ProtocolError
from leakgauge.fl import aggregate
from leakgauge.secure import Outcome, primitives, run, shamir
from leakgauge.secure.run import STEPS
from leakgauge.tensors import parameters
from leakgauge.threat import observe
from leakgauge.types import Batch, LocalTraining, Named, Round, SecureSum, ThreatModel

# --- the sum -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("share", [0, 0.1, 0.2, 0.3])
def test_the_sum_is_exact_with_drop_outs_at_every_step(share, step, ring):
    given = vectors(10, ring=ring)
    gone = random.Random(step).sample(range(10), round(10 * share))
    outcome = run(given, dropped={step: gone}, entropy=drawn(1))
    included = [k for k in range(10) if k not in gone or step == "unmask"]  # its vector arrived
    assert outcome.included == tuple(included)
    assert outcome.total.dtype == TYPES[ring]
    assert outcome.total.tolist() == summed([given[k] for k in included], ring)


def test_the_sum_is_exact_with_drop_outs_at_all_steps_at_once():
    given = vectors(20)
    gone = {"advertise": [3], "share": [0, 19], "mask": [7, 8], "unmask": [12]}
    outcome = run(given, dropped=gone, entropy=drawn(2))
    included = [k for k in range(20) if k not in (3, 0, 19, 7, 8)]
    assert outcome.total.tolist() == summed([given[k] for k in included], 32)


@pytest.mark.parametrize("clients", [2, 3, 4, 7])
def test_small_rounds_give_their_sum(clients):
    given = vectors(clients)
    assert run(given).total.tolist() == summed(given, 32)  # with chance of the operating system


def test_two_runs_with_the_same_entropy_send_the_same_and_others_do_not():
    first, again, other = (Play(seed=s) for s in (0, 0, 0))
    for one in other.clients:
        one._seed = bytes(32)
    sent = [play.masked() for play in (first, again, other)]
    assert sent[0] == sent[1]
    assert all(a.values != b.values for a, b in zip(sent[0], sent[2], strict=True))
    outcomes = [run(vectors(6), entropy=drawn(s), dropped={"mask": [1]}) for s in (5, 5, 6)]
    for outcome in outcomes:
        assert outcome.total.tolist() == outcomes[0].total.tolist()


def test_the_work_of_each_role_is_timed():
    outcome = run(vectors(4, 20_000))
    assert isinstance(outcome, Outcome)
    assert len(outcome.client_seconds) == 4
    assert min(*outcome.client_seconds, outcome.server_seconds) > 0


# --- the view is the protocol's sum ------------------------------------------------------------


def same(left: Named, right: Named) -> bool:
    return left.keys() == right.keys() and all(torch.equal(v, right[n]) for n, v in left.items())


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("weighting", ["records", "equal"])
def test_what_is_observed_is_the_sum_of_the_protocol_bit_for_bit(model, ring, weighting):
    rng = torch.Generator().manual_seed(3)
    sizes = (1, 4, 2, 3, 2)
    truths = tuple(Batch(torch.rand(n, 3, 8, 8), torch.zeros(n, dtype=torch.long)) for n in sizes)
    updates = tuple(
        {n: torch.randn(v.shape, generator=rng) for n, v in parameters(model).items()}
        for _ in sizes
    )
    settings = SecureSum(clip=1.5, bits=12, ring=ring)
    round_ = Round(
        setting=setting(model, (3, 8, 8), 4), truths=truths, updates=updates,
        weights=aggregate.weights(sizes, weighting), after={}, training=LocalTraining(),
        sizes=sizes, secure=settings,
    )  # fmt: skip
    who = ThreatModel("aggregate")
    seen = observe(round_, who)
    counts = aggregate.counts(sizes, weighting)
    sent = [aggregate.encode(u, n, settings) for u, n in zip(updates, counts, strict=True)]
    # A sixth client drops out when all others have its shares.
    outcome = run([*sent, sent[0]], threshold=4, dropped={"mask": [5]})
    assert int(outcome.total[-1]) == sum(counts)
    assert same(seen.update, aggregate.decode(outcome.total, updates[0], settings))
    plain = observe(replace(round_, secure=None), who)
    assert not same(seen.update, plain.update)
    assert same(observe(replace(round_, secure=SecureSum()), who).update, plain.update)


# --- what is hidden ----------------------------------------------------------------------------


def uniform(values: bytes) -> float:
    """The p-value of all byte values being equally likely."""
    return float(chisquare(np.bincount(np.frombuffer(values, np.uint8), minlength=256)).pvalue)


def small(play: Play) -> Play:
    """Vectors like real ones: small numbers around zero, so that high bytes are 0 or 255."""
    rng = np.random.default_rng(0)
    play.vectors = [
        rng.integers(-999, 999, play.session.length).astype("<u4") for _ in play.clients
    ]
    return play


def test_a_masked_vector_looks_uniform():
    play = small(Play(length=50_000))
    for one, plain in zip(play.masked(), play.vectors, strict=True):
        assert uniform(plain.tobytes()) < 1e-100
        assert 1e-3 < uniform(one.values) < 1 - 1e-3


def test_without_masks_it_does_not(monkeypatch):
    monkeypatch.setattr(primitives, "stream", lambda key, length, ring: np.zeros(length, "<u4"))
    for one in small(Play(length=50_000)).masked():
        assert uniform(one.values) < 1e-100


def test_with_short_masks_it_does_not(monkeypatch):
    whole = primitives.stream
    monkeypatch.setattr(primitives, "stream", lambda *a: whole(*a) & np.uint32(0xFFFFFF))
    play = small(Play(length=50_000))
    values = np.frombuffer(play.masked()[0].values, np.uint8)[3::4].tobytes()  # the top bytes
    assert uniform(values) < 1e-100


def test_masks_alone_do_not_depend_on_the_vector():
    one, other = Play(), Play()
    other.vectors = [value + np.uint32(k + 1) for k, value in enumerate(other.vectors)]
    for k, (a, b) in enumerate(zip(one.masked(), other.masked(), strict=True)):
        moved = np.frombuffer(b.values, "<u4") - np.frombuffer(a.values, "<u4")
        assert moved.tolist() == [k + 1] * len(moved)


def test_a_mask_comes_from_all_256_bits_of_its_secret():
    secret, session = bytes(32), b"s" * 32
    keys = {primitives.derived(secret, session, "pair mask", 0, 1)}
    for bit in range(256):
        turned = (1 << bit).to_bytes(32, "big")
        keys.add(primitives.derived(turned, session, "pair mask", 0, 1))
    assert len(keys) == 257
    assert {len(key) for key in keys} == {32}
    assert len({primitives.stream(key, 4, 32).tobytes() for key in keys}) == 257
    for bit in range(256):  # nor does the stream drop a part of its key
        key = (1 << bit).to_bytes(32, "big")
        assert primitives.stream(key, 4, 32).tobytes() != primitives.stream(secret, 4, 32).tobytes()


def test_keys_of_other_purposes_sessions_and_clients_differ():
    named = [("pair mask", (0, 1)), ("pair mask", (0, 2)), ("seal", (0, 1)), ("seal", (1, 0))]
    keys = {
        primitives.derived(bytes(32), session, purpose, *clients)
        for session in (b"a" * 16, b"b" * 16)
        for purpose, clients in named
    }
    assert len(keys) == 8


def test_both_sides_of_a_pair_agree_and_nobody_else():
    a, b, c = (drawn(k)(32) for k in range(3))
    assert primitives.agreed(a, primitives.public_of(b)) == primitives.agreed(
        b, primitives.public_of(a)
    )
    assert primitives.agreed(c, primitives.public_of(b)) != primitives.agreed(
        a, primitives.public_of(b)
    )


@pytest.mark.parametrize("public", [bytes(32), b"short"])
def test_an_unsafe_public_key_is_refused(public):
    with pytest.raises(ProtocolError, match="safe public X25519 key"):
        primitives.agreed(drawn(0)(32), public)


def test_every_message_is_numbers_and_bytes():
    play = Play()
    keys = play.server.keys([one.advertise() for one in play.clients])
    boxes = [box for one in play.clients for box in one.share(keys)]
    routed = play.server.shares(boxes)
    masked = [one.mask(routed[one.number], play.vectors[one.number]) for one in play.clients[1:]]
    request = play.server.vectors(masked)
    opened = [one.unmask(request) for one in play.clients[1:]]

    def plain(value: object) -> bool:
        if isinstance(value, tuple):
            return all(map(plain, value))
        return type(value) in (int, bytes)

    for message in (*keys, *boxes, *masked, request, *opened, play.session):
        assert all(plain(getattr(message, field.name)) for field in fields(message)), message
    assert opened[0].keys  # a client dropped out: all kinds of shares were there


def test_nothing_is_pickled():
    folder = Path(primitives.__file__).parent
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {alias.name for n in nodes for alias in n.names}
        names |= {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}
        assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
        uses = any(name.startswith("cryptography") for name in names)
        assert uses == (path.name == "primitives.py")


# --- shares ------------------------------------------------------------------------------------


def test_the_prime_is_the_first_above_all_secrets():
    assert isprime(shamir.PRIME)
    assert prevprime(shamir.PRIME) < 2**256 < shamir.PRIME < 2 ** (8 * shamir.SHARE)


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, drawn(3)(32)], ids=["0", "1", "any"])
def test_any_threshold_of_shares_gives_the_secret(secret):
    shares = shamir.split(secret, 3, range(6), drawn(4))
    for chosen in combinations(shares, 3):
        assert shamir.join({k: shares[k] for k in chosen}) == secret
        back = dict(reversed([(k, shares[k]) for k in chosen]))  # in any order
        assert shamir.join(back) == secret
    for chosen in combinations(shares, 2):
        assert guessed({k: shares[k] for k in chosen}) != secret


def guessed(shares: dict[int, bytes]) -> bytes | None:
    try:
        return shamir.join(shares)
    except ProtocolError:
        return None


def test_one_share_fewer_tells_nothing():
    """Two secrets, very different: what two of three shares look like is the same, uniform."""
    entropy = drawn(5)
    for secret in (bytes(32), b"\xff" * 32):
        seen = [shamir.split(secret, 3, (0, 4), entropy) for _ in range(4000)]
        for client in (0, 4):
            low = b"".join(shares[client][1:] for shares in seen)  # the top byte is 0 or 1
            assert uniform(low) > 1e-3
        apart = b"".join(bytes(a ^ b for a, b in zip(s[0], s[4], strict=True))[1:] for s in seen)
        assert uniform(apart) > 1e-3
        guesses = [guessed(shares) or bytes(32) for shares in seen]
        assert uniform(b"".join(guesses)) > 1e-3


def test_a_polynomial_of_lower_degree_would_be_noticed():
    """The same test of a sharing with one coefficient: two of three shares give it all away."""
    secret = bytes(32)
    seen = [shamir.split(secret, 2, (0, 4), drawn(k)) for k in range(200)]
    assert uniform(b"".join(guessed(shares) for shares in seen)) < 1e-100


@pytest.mark.parametrize("number", [0, 2**256, shamir.PRIME - 1])
def test_coefficients_are_all_numbers_below_the_prime_and_no_others(number):
    """Numbers of 257 bits: what is not below the prime is drawn again, not taken modulo it."""
    numbers = iter([2**257 - 1, shamir.PRIME, number])
    shares = shamir.split(bytes(32), 2, (0,), lambda n: (next(numbers) << 7).to_bytes(n, "big"))
    assert int.from_bytes(shares[0], "big") == number  # f(1) = 0 + number · 1


def test_wrong_shares_are_refused():
    shares = shamir.split(drawn(6)(32), 2, (0, 1), drawn(7))
    for wrong in (shares[0][:-1], b"\xff" * shamir.SHARE):
        with pytest.raises(ProtocolError, match="33 bytes"):
            shamir.join({0: wrong, 1: shares[1]})
