"""A connection lets others go on, and its driver look at the time, however fast a server sends."""

import ssl

import pytest
from normserve.client.http.connection import ClientHttpConnection
from normserve.client.http.message_heads import ResponseHeadParser

INTERIM = b"HTTP/1.1 103 Early Hints\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class EndlessSocket(ssl.SSLSocket):
    """A socket with TLS that always has more of the same; it counts how often it is read without a pause."""

    def __new__(cls, *_):
        return super().__new__(cls)

    def __init__(self, piece):
        self.piece, self.reads = piece, 0

    def fileno(self):
        return 0

    def recv_into(self, view):
        self.reads += 1
        assert self.reads < 100
        view[: len(self.piece)] = self.piece
        return len(self.piece)


def rounds(steps, endless, count=10):
    """Drive steps that never end for some rounds."""
    next(steps)
    for _ in range(count):
        endless.reads = 0
        steps.send(1)


def test_interim_answers_without_end_let_others_go_on():
    endless = EndlessSocket(INTERIM * 10)
    rounds(ClientHttpConnection(endless).receive_head(), endless)


@pytest.mark.parametrize("piece", [b"1;a=b\r\nx\r\n", b"1;" + b"a" * 100], ids=["small chunks", "extensions"])
def test_a_body_of_small_chunks_lets_others_go_on(piece):
    endless = EndlessSocket(piece)
    connection = ClientHttpConnection(endless)
    head = ResponseHeadParser().parse(CHUNKED)

    def body():
        while (yield from connection.receive_piece(head)) is not None:
            pass

    rounds(body(), endless)
