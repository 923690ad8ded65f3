"""Roles of secure aggregation that refuse: too few clients, cheating, wrong messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from secure_play import Play, drawn, vectors

from leakgauge.errors import InputError, ProtocolError
from leakgauge.fl.aggregate import quorum
from leakgauge.secure import Client, Server, Session, primitives, run, shamir
from leakgauge.secure.messages import Opened, Request
from leakgauge.secure.run import STEPS

# --- too few -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_fewer_than_the_threshold_give_no_sum(step):
    assert quorum(10) == 7
    with pytest.raises(ProtocolError, match=r"6 clients sent .* 7 must \(threshold\)"):
        run(vectors(10), dropped={step: range(4)})


def test_a_client_stops_with_too_few_peers():
    play = Play(5, 4)
    keys = play.keys()
    with pytest.raises(ProtocolError, match="client 0 stops: 3 clients sent keys, but 4 must"):
        play.clients[0].share(keys[:3])
    boxes = [box for one in play.clients[1:] for box in one.share(keys)]
    mine = [box for box in boxes if box.receiver == 1][:2]
    with pytest.raises(ProtocolError, match="client 1 stops: 3 clients shared their secrets"):
        play.clients[1].mask(mine, play.vectors[1])
    for one in play.clients[:2]:
        assert one.state == "aborted"
        with pytest.raises(ProtocolError, match="is aborted"):
            one.unmask(Request((0, 1, 2, 3, 4), ()))


def test_a_client_opens_nothing_for_too_few_vectors():
    play = Play(5, 3)
    play.request()
    with pytest.raises(ProtocolError, match="2 clients sent their vectors, but 3 must"):
        play.clients[0].unmask(Request((0, 1), (2, 3, 4)))


@pytest.mark.parametrize(("clients", "threshold"), [(2, 1), (4, 2), (10, 5), (10, 11), (1, 1)])
def test_a_threshold_that_protects_nobody_is_refused(clients, threshold):
    with pytest.raises(InputError, match=r"more than half|its own update"):
        Session(bytes(32), clients, threshold, 1)


# --- a server that cheats ----------------------------------------------------------------------


def test_a_server_that_asks_for_both_shares_is_refused():
    play = Play()
    asked = play.request()
    greedy = replace(asked, dropped=(2,))
    for one in play.clients:
        with pytest.raises(ProtocolError, match="both shares of client 2"):
            one.unmask(greedy)
        with pytest.raises(ProtocolError, match="is aborted"):  # nor later
            one.unmask(asked)


def test_a_server_that_asks_again_is_refused():
    play = Play()
    asked = play.request()
    play.clients[0].unmask(asked)
    with pytest.raises(ProtocolError, match="is done"):
        play.clients[0].unmask(Request((0, 1, 3, 4), (2,)))


def test_a_server_that_tells_two_stories_gets_one_secret_at_most():
    """It tells some that client 2 dropped out, and others that it did not."""
    for listening in range(6):
        play = Play(5, 3)
        play.request()
        truth, lie = Request((0, 1, 2, 3, 4), ()), Request((0, 1, 3, 4), (2,))
        opened: list[Opened] = []
        for one in play.clients:
            try:
                opened.append(one.unmask(lie if one.number < listening else truth))
            except ProtocolError:
                assert one.number == 2  # it knows that it did not drop out
        seeds = [one for one in opened if 2 in dict(one.seeds)]
        keys = [one for one in opened if 2 in dict(one.keys)]
        assert min(len(seeds), len(keys)) < 3


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request((1, 2, 3, 4), (0,)), "its vector did not arrive"),
        (Request((0, 1, 2, 3), ()), "not those who shared"),
        (Request((0, 1, 2, 3, 4, 9), ()), "not those who shared"),
    ],
)
def test_a_client_gives_nothing_for_lists_that_cannot_be(request_, why):
    play = Play()
    play.request()
    with pytest.raises(ProtocolError, match=f"client 0 stops: .*{why}"):
        play.clients[0].unmask(request_)
    assert play.clients[0].state == "aborted"


def test_a_client_notices_keys_that_were_exchanged():
    stranger = primitives.public_of(drawn(9)(32))
    for change, why in [
        (lambda keys: [replace(keys[0], mask=stranger), *keys[1:]], "its own keys came back"),
        (lambda keys: [*keys, keys[1]], "stands twice"),
        (lambda keys: [keys[0], keys[1], replace(keys[2], mask=keys[1].mask), *keys[3:]], "twice"),
        (lambda keys: [*keys[:4], replace(keys[4], client=9)], "not in the session"),
        (lambda keys: keys[1:], "its own keys came back"),
    ]:
        play = Play()
        keys = list(play.keys())
        with pytest.raises(ProtocolError, match=f"client 0 stops: .*{why}"):
            play.clients[0].share(change(keys))


def test_a_changed_or_misled_share_is_refused():
    for change in (
        lambda boxes: replace(boxes[0], box=boxes[0].box[:-1] + bytes([boxes[0].box[-1] ^ 1])),
        lambda boxes: replace(boxes[0], box=b""),
        lambda boxes: replace(boxes[0], box=boxes[1].box),  # of another sender
        lambda boxes: replace(boxes[0], receiver=3),
        lambda boxes: boxes[1],  # twice
    ):
        play = Play()
        boxes = list(play.routed()[0])
        with pytest.raises(ProtocolError, match=r"changed on its way|not for it"):
            play.clients[0].mask([change(boxes), *boxes[1:]], play.vectors[0])
        assert play.clients[0].state == "aborted"


def test_only_its_receiver_opens_a_share():
    """The server knows all public keys and no private one."""
    play = Play()
    keys = play.keys()
    box = play.clients[0].share(keys)[0]
    bound = f"0/{box.receiver}/".encode() + play.session.id

    def attempt(private: bytes, public: bytes) -> bytes:
        secret = primitives.agreed(private, public)
        key = primitives.derived(secret, play.session.id, "seal", 0, box.receiver)
        return primitives.opened(key, box.box, bound)

    content = attempt(play.clients[box.receiver]._seal, keys[0].seal)
    assert len(content) == 2 * shamir.SHARE
    for public in keys:
        with pytest.raises(ProtocolError):
            attempt(drawn(8)(32), public.seal)
    with pytest.raises(ProtocolError):
        attempt(play.clients[4]._seal, keys[0].seal)


# --- clients that send what they should not ----------------------------------------------------


def test_the_server_refuses_what_does_not_belong():
    play = Play()
    keys = [one.advertise() for one in play.clients]
    with pytest.raises(ProtocolError, match="keys came twice"):
        Server(play.session).keys([*keys, keys[0]])
    with pytest.raises(ProtocolError, match="keys came twice"):
        Server(play.session).keys([*keys[1:], replace(keys[0], client=5)])
    list_ = play.server.keys(keys)
    boxes = [box for one in play.clients for box in one.share(list_)]
    routed = play.server.shares(boxes)
    with pytest.raises(ProtocolError, match="waits for vectors"):
        play.server.shares(boxes)
    masked = [one.mask(routed[one.number], play.vectors[one.number]) for one in play.clients]
    with pytest.raises(ProtocolError, match="sent 3 bytes, expected 160"):
        play.server.vectors([replace(masked[0], values=b"abc"), *masked[1:]])
    assert play.server.state == "aborted"


def test_the_server_refuses_a_client_that_leaves_out_a_box():
    play = Play()
    keys = play.keys()
    boxes = [box for one in play.clients for box in one.share(keys)]
    with pytest.raises(ProtocolError, match="client 0 did not send one box"):
        play.server.shares(boxes[1:])


def test_a_wrong_share_of_a_mask_key_is_noticed():
    play = Play()
    asked = play.request(absent=(4,))
    opened = [one.unmask(asked) for one in play.clients[:4]]
    seed = dict(opened[0].seeds)[0]
    wrong = replace(opened[0], keys=((4, seed),))
    with pytest.raises(ProtocolError, match=r"mask key do not give its key|not belong"):
        play.server.total([wrong, *opened[1:]])


def test_a_missing_share_is_noticed():
    play = Play()
    asked = play.request()
    opened = [one.unmask(asked) for one in play.clients]
    with pytest.raises(ProtocolError, match="client 0 did not send its share of client 0"):
        play.server.total([replace(opened[0], seeds=opened[0].seeds[1:]), *opened[1:]])


@pytest.mark.parametrize(
    "values", [np.zeros(3, "<u4"), np.zeros(40, "<u8"), np.zeros((40, 1), "<u4"), np.zeros(40)]
)
def test_a_vector_of_another_kind_is_refused_before_it_leaves(values):
    play = Play()
    routed = play.routed()
    with pytest.raises(InputError, match="expected 40 numbers of type uint32"):
        play.clients[0].mask(routed[0], values)
    assert play.clients[0].state == "shared"  # its own mistake: it may try again


@pytest.mark.parametrize(
    ("given", "dropped", "why"),
    [
        ([], {}, "one vector per client"),
        ([np.zeros(2)] * 3, {}, "one vector per client"),
        ([np.zeros(2, "<u4")], {}, "its own update"),
        ([np.zeros(2, "<u4")] * 3, {"sleep": [0]}, "'sleep'"),
        ([np.zeros(2, "<u4")] * 3, {"mask": [3]}, "clients from 0 to 2"),
    ],
)
def test_a_run_that_cannot_be_is_refused(given, dropped, why):
    with pytest.raises(InputError, match=why):
        run(given, dropped=dropped)


def test_a_client_outside_the_session_is_refused():
    with pytest.raises(InputError, match="from 0 to 2"):
        Client(Session(bytes(32), 3, 2, 1), 3)
    for wrong in ({"ring": 16}, {"length": 0}, {"id": b""}):
        with pytest.raises(InputError, match="expected a ring"):
            Session(**{"id": bytes(32), "clients": 3, "threshold": 2, "length": 1} | wrong)
