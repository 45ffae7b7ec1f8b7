"""What the extension knows of connections and their requests, and what it keeps for them."""

import socket

import pytest
from normserve.backends.replay_interface import LEFT, RECEIVED

from tests.service.backends.cuda.replayer_client import CONTENT, RESULTS, Client, client, frame

__all__ = ["client"]


def test_a_client_that_has_gone_is_reported(client):
    client.theirs.close()
    assert client.serve() == [(RECEIVED, client.descriptor, 0, 0, b"")]


def test_what_is_in_flight_keeps_what_it_uses_after_its_connection_is_closed(client):
    client.driver.ends_at_once = False
    held = Held()
    client.learn(retained=held)
    client.send(CONTENT)
    client.serve(max_s=0.01)
    client.replayer.remove_connection(client.descriptor)
    del held
    assert Held.there == 1
    assert client.replayer.count_all()[:2] == (1, 100)
    client.driver.end()
    [(kind, _, tag, _, kept)] = client.serve(max_s=0.01)
    assert (kind, tag, type(kept)) == (LEFT, 1, Held)
    del kept
    assert Held.there == 0
    assert client.replayer.count_all() == (0, 0, 0)
    assert not client.has_answer()


class Held:
    there = 0

    def __init__(self):
        Held.there += 1

    def __del__(self):
        Held.there -= 1


@pytest.mark.parametrize("forget", ["remove_replays", "remove_all_replays", "add_replay", "remove_connection"])
def test_what_is_forgotten_is_released(client, forget):
    client.learn(retained=Held())
    client.send(CONTENT)
    client.serve()
    assert Held.there == 1
    client.replayer.take_samples()
    if forget == "add_replay":
        client.learn(graph=10)
    elif forget == "remove_all_replays":
        client.replayer.remove_all_replays()
    else:
        getattr(client.replayer, forget)(client.descriptor)
    assert Held.there == 0


def test_a_forgotten_request_is_for_the_caller_and_a_newly_learned_one_is_launched(client):
    client.replayer.remove_replays(client.descriptor)
    client.send(CONTENT)
    [(kind, *_)] = client.serve()
    assert kind == RECEIVED
    client.learn(graph=11)
    client.learn(graph=12)
    client.send(CONTENT)
    client.serve()
    assert client.driver.launched == [12]


def known(client, contents):
    """Which of these contents are launched."""
    found = []
    for content in contents:
        client.send(content)
        if not client.serve():
            client.answers(1)
            found.append(content)
    return found


def test_of_more_requests_than_are_kept_any_are_forgotten(client):
    contents = [b"%d" % number for number in range(1500)]
    for number, content in enumerate(contents):
        client.learn(content, number)
    assert len(known(client, contents)) in (1023, 1024)
    assert known(client, contents[-1:])


def test_of_more_requests_than_are_kept_of_all_a_connection_gives_up_its_own(client):
    pairs = [socket.socketpair() for _ in range(5)]
    try:
        for ours, _ in pairs:
            client.replayer.add_connection(ours.fileno())
            for number in range(1024):
                client.replayer.add_replay(ours.fileno(), b"%d" % number, 1, 8, (), RESULTS, 0, 0, None)
        # The fifth found no place beside the first, which keeps its request, and can have another instead.
        ours, theirs = pairs[-1]
        client.replayer.set_receiving(ours.fileno(), True)
        theirs.send(frame(1, b"0"))
        assert known(client, [CONTENT]) == []
        client.learn(b"other")
        assert known(client, [CONTENT, b"other"]) == [b"other"]
        # What others give up can be had.
        client.replayer.remove_connection(pairs[0][0].fileno())
        client.learn(CONTENT)
        assert known(client, [CONTENT, b"other"]) == [CONTENT, b"other"]
    finally:
        for ours, theirs in pairs:
            ours.close()
            theirs.close()


def test_connections_do_not_share_what_they_know(client):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client.replayer.add_connection(ours.fileno())
        client.replayer.set_receiving(ours.fileno(), True)
        theirs.sendall(frame(1, CONTENT))
        assert client.serve() == [(RECEIVED, ours.fileno(), 0, 0, frame(1, CONTENT))]


@pytest.mark.parametrize(
    "method",
    ["remove_connection", "set_receiving", "set_caller_state", "add_replay", "remove_replays", "count_launches"],
)
def test_a_descriptor_that_is_not_known_is_refused(client, method):
    arguments = {
        "set_receiving": (True,),
        "set_caller_state": (True, True),
        "add_replay": (b"", 1, 1, (), b"", 0, 0, None),
    }.get(method, ())
    for descriptor in (-1, 10**6, client.theirs.fileno()):
        with pytest.raises(KeyError):
            getattr(client.replayer, method)(descriptor, *arguments)
    for descriptor in (client.descriptor, -1):
        with pytest.raises(ValueError, match="in use or is none"):
            client.replayer.add_connection(descriptor)


def test_nothing_is_left_of_a_replayer():
    client = Client()
    with client.ours, client.theirs:
        client.learn(retained=Held())
        client.send(CONTENT, b"{}")
        client.serve()
        client.replayer = None
        assert Held.there == 0
