"""What is taken for an answer's head, and what is not sent as a request's."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.client.http import message_heads
from normserve.client.http.message_heads import HEAD_BYTES, ResponseHeadParser, encode_request_head


def read_head(raw):
    """Read a head that is the first of its connection."""
    return ResponseHeadParser().parse(raw)


def head(*lines):
    return b"\r\n".join([*lines, b"", b""])


def test_a_head_says_how_its_body_ends():
    plain = read_head(head(b"HTTP/1.1 200 OK", b"Content-Length: 5", b"X-Name: a", b"x-name: b"))
    assert (plain.status, plain.remaining_body_bytes, plain.chunk_decoder, plain.is_keep_alive) == (
        200,
        5,
        None,
        True,
    )
    assert plain.headers == {"content-length": "5", "x-name": "a, b"}
    chunked = read_head(head(b"HTTP/1.1 200 OK", b"Transfer-Encoding: Chunked"))
    assert (chunked.remaining_body_bytes, chunked.is_keep_alive) == (None, True)
    assert chunked.chunk_decoder is not None
    until_close = read_head(head(b"HTTP/1.1 200 OK"))
    assert (until_close.remaining_body_bytes, until_close.chunk_decoder, until_close.is_keep_alive) == (
        None,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("lines", "stays"),
    [
        ([b"HTTP/1.1 200 OK", b"Connection: close"], False),
        ([b"HTTP/1.1 200 OK", b"Connection: Keep-Alive, Close"], False),
        ([b"HTTP/1.0 200 OK"], False),
        ([b"HTTP/1.0 200 OK", b"Connection: keep-alive"], True),
    ],
)
def test_a_head_says_whether_the_connection_stays(lines, stays):
    assert read_head(head(*lines, b"Content-Length: 0")).is_keep_alive is stays


def test_no_body_comes_where_none_can():
    assert read_head(head(b"HTTP/1.1 204 No Content")).remaining_body_bytes == 0
    assert read_head(head(b"HTTP/1.1 304 Not Modified", b"Content-Length: 7")).remaining_body_bytes == 0
    assert read_head(head(b"HTTP/1.1 103 Early Hints", b"Link: x")).remaining_body_bytes == 0


@pytest.mark.parametrize(
    "lines",
    [
        [b""],
        [b"HTTP/2 200"],
        [b"HTTP/1.1 20 OK"],
        [b"HTTP/1.1 099 OK"],
        [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: x", b"Connection: upgrade"],
        [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Content-Length: 6"],
        [b"HTTP/1.1 200 OK", b"Content-Length: -1"],
        [b"HTTP/1.1 200 OK", b"Content-Length: 1, 2"],
        [b"HTTP/1.1 200 OK", b"Content-Length: " + b"9" * 5000],
        [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Transfer-Encoding: chunked"],
        [b"HTTP/1.1 200 OK", b"Transfer-Encoding: gzip, chunked"],
        [b"HTTP/1.1 200 OK", b"Transfer-Encoding: identity"],
        [b"HTTP/1.1 200 OK", b"X: a\0b"],
        [b"HTTP/1.1 200 OK", b": x"],
        [b"HTTP/1.1 200 OK", b"no colon"],
    ],
)
def test_what_is_no_head_is_refused(lines):
    with pytest.raises(httpx.RemoteProtocolError):
        read_head(head(*lines))


def chunks():
    return read_head(head(b"HTTP/1.1 200 OK", b"Transfer-Encoding: chunked")).chunk_decoder


def test_chunks_are_read_however_they_are_cut():
    body = b"5\r\nhello\r\n1;name=value\r\n!\r\n0\r\nTrailer: x\r\n\r\n"
    for step in (1, 2, 7, len(body)):
        reader = chunks()
        read = b"".join(reader.decode(body[start : start + step]) for start in range(0, len(body), step))
        assert read == b"hello!"
        assert reader.is_complete
        assert not reader.has_excess


@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\n"])
def test_what_comes_behind_the_last_chunk_is_noticed(more):
    reader = chunks()
    assert reader.decode(b"1\r\na\r\n0\r\n\r\n" + more) == b"a"
    assert (reader.is_complete, reader.has_excess) == (True, True)


@pytest.mark.parametrize(
    "body", [b"-1\r\n", b"xyz\r\n", b"f" * 30 + b"\r\n", b"1\r\nab\r\n", b"1\nx\n"], ids=lambda body: body[:6]
)
def test_what_are_no_chunks_is_refused(body):
    with pytest.raises(httpx.RemoteProtocolError):
        chunks().decode(body)


@pytest.mark.parametrize("beginning", [b"5;name=", b"0\r\nTrailer: "])
def test_what_is_no_body_is_bounded(beginning):
    reader = chunks()
    reader.decode(beginning + b"x" * (HEAD_BYTES - len(beginning)))
    with pytest.raises(httpx.RemoteProtocolError):
        reader.decode(b"x")


def test_a_request_s_head_is_what_it_was_given():
    made = encode_request_head(b"POST", b"/v1/x?a=b", [(b"Host", b"h"), (b"X", b"")])
    assert made == b"POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\nX: \r\n\r\n"


@pytest.mark.parametrize(
    ("method", "target", "header"),
    [
        (b"GET /", b"/", (b"a", b"b")),
        (b"", b"/", (b"a", b"b")),
        (b"GET", b"/ HTTP/1.1\r\nX: y", (b"a", b"b")),
        (b"GET", b"", (b"a", b"b")),
        (b"GET", b"/\xff", (b"a", b"b")),
        (b"GET", b"/", (b"a", b"b\r\nX: y")),
        (b"GET", b"/", (b"a", b"b\n")),
        (b"GET", b"/", (b"a", b"\0")),
        (b"GET", b"/", (b"a: b\r\nc", b"d")),
        (b"GET", b"/", (b"", b"d")),
    ],
)
def test_what_would_be_read_as_something_else_is_not_sent(method, target, header):
    with pytest.raises(httpx.LocalProtocolError):
        encode_request_head(method, target, [header])


ANSWER = (
    b"HTTP/1.1 200 OK",
    b"Server-Timing: recv;dur=0.25, kernel;dur=1.5",
    b"X-Request-ID: abc",
    b"Content-Length: 4096",
)


@pytest.fixture
def learnt():
    """A reader of one head before."""
    reader = ResponseHeadParser()
    reader.parse(head(*ANSWER))
    assert len(reader._patterns) == 1
    return reader


def outcome(raw, reader):
    try:
        found = reader.parse(raw)
    except httpx.RemoteProtocolError:
        return None
    return found.status, found.headers, found.remaining_body_bytes, found.chunk_decoder is None, found.is_keep_alive


def test_a_head_like_one_before_is_read_without_the_parser(learnt, monkeypatch):
    monkeypatch.setattr(message_heads, "_run_parser", None)
    again = learnt.parse(head(*ANSWER[:2], b"X-Request-ID: d: e", b"Content-Length: 17"))
    assert (again.status, again.remaining_body_bytes, again.chunk_decoder, again.is_keep_alive) == (
        200,
        17,
        None,
        True,
    )
    assert again.headers == {
        "server-timing": "recv;dur=0.25, kernel;dur=1.5",
        "x-request-id": "d: e",
        "content-length": "17",
    }


@pytest.mark.parametrize("place", range(len(ANSWER)))
@pytest.mark.parametrize(
    "line",
    [
        b"Connection: close",
        b"Transfer-Encoding: chunked",
        b"Content-Length: 4096",
        b"Content-Length: +5",
        b"Content-Length: 05",
        b"Content-Length: " + b"9" * 16,
        b"Content-Length: 9" + b"9" * 5000,
        b"Content-Length:5",
        b"Content-Length : 5",
        b"X-Request-ID:",
        b"X-Request-ID: ",
        b"X-Request-ID:  a ",
        b"X-Request-ID: a\0b",
        b"X-Request-ID: a\rb",
        b"X-Request-ID: a\nContent-Length: 5",
        b"X-Request-ID: a\tb",
        b"X-Request-ID: \xff",
        b"X-Request-ID",
        b" folded",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 503 Service Unavailable",
        b"HTTP/1.1 2000 OK",
    ],
)
def test_what_came_before_changes_nothing_of_what_is_read(learnt, place, line):
    raw = head(*ANSWER[:place], line, *ANSWER[place + 1 :])
    assert outcome(raw, learnt) == outcome(raw, ResponseHeadParser())


@given(st.data())
def test_a_head_changed_anywhere_is_read_as_the_parser_reads_it(data):
    raw = bytearray(head(*ANSWER))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 5))] = data.draw(st.integers(0, 255))
    reader = ResponseHeadParser()
    reader.parse(head(*ANSWER))
    assert outcome(bytes(raw), reader) == outcome(bytes(raw), ResponseHeadParser())


@pytest.mark.parametrize(
    "lines",
    [
        [b"HTTP/1.1 200 OK", b"X: a"],
        [b"HTTP/1.1 404 Not Found", b"Content-Length: 5"],
        [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Connection: keep-alive"],
        [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"X: a", b"X: b"],
        [b"HTTP/1.1 200 OK", b"Content-Length: 5", b"X: " + b"a" * 4096],
    ],
)
def test_of_other_heads_nothing_is_remembered(lines):
    reader = ResponseHeadParser()
    reader.parse(head(*lines))
    assert reader._patterns == []


def fill(reader):
    for number in range(20):
        reader.parse(head(b"HTTP/1.1 200 OK", b"Content-Length: 5", b"X-%d: a" % number))


def test_of_many_kinds_of_heads_few_are_remembered():
    reader = ResponseHeadParser()
    fill(reader)
    assert len(reader._patterns) == 4


def test_what_one_server_sends_is_not_remembered_for_another(monkeypatch):
    fill(ResponseHeadParser())
    other = ResponseHeadParser()
    other.parse(head(*ANSWER))
    monkeypatch.setattr(message_heads, "_run_parser", None)
    assert other.parse(head(*ANSWER)).remaining_body_bytes == 4096
