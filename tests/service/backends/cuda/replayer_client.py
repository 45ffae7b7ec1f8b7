"""A connection that a replayer receives on, and its client."""

import socket
from collections.abc import Iterator

import pytest
from normserve.backends.cuda.replayer import build
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader

from tests.service.backends.cuda.fake_driver import FakeDriver

CONTENT = b'{"do":"compute"}'
RESULTS = b'{"y":{"segment":0,"offset":16,"dtype":"float32","shape":[2,4]}}'
MANY = 10**9


class Client:
    """A connection that a replayer receives on, and one request that it has learned: graph 7 on stream 8."""

    def __init__(self):
        self.driver = FakeDriver()
        self.replayer = build.load_extension()(**self.driver.addresses())
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.settimeout(20)
        self.descriptor = self.ours.fileno()
        self.replayer.add_connection(self.descriptor)
        self.replayer.set_receiving(self.descriptor, True)
        self.retained = ["what the launch reads"]
        self.learn()

    def learn(self, content=CONTENT, graph=7, results=RESULTS, *, stream=8, part_events=(), retained=None):
        retained = self.retained if retained is None else retained
        self.replayer.add_replay(self.descriptor, content, graph, stream, part_events, results, 5000, 100, retained)

    def serve(self, *, requests=MANY, nbytes=MANY, may_launch=True, poll_s=0.0, other_descriptor=-1, max_s=1.0):
        return self.replayer.serve(requests, nbytes, may_launch, poll_s, other_descriptor, max_s)

    def send(self, *contents, tag=1):
        self.theirs.sendall(b"".join(frame(tag + place, each) for place, each in enumerate(contents)))

    def answers(self, count):
        """The next so many answers, with their tags."""
        cut, found = FrameReader(2**20), []
        while len(found) < count:
            found += cut.feed(self.theirs.recv(2**16))
        return [(tag, frames.decode_response(content)) for tag, content in found]

    def has_answer(self):
        self.theirs.settimeout(0)
        try:
            return bool(self.theirs.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            self.theirs.settimeout(20)


def frame(tag, content):
    return frames.PREFIX.pack(len(content), tag) + content


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    with client.ours, client.theirs:
        yield client
