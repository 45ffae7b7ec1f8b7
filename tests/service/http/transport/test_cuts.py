"""The same bytes give the same requests, bodies and refusals, however they are cut on their way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .drive import Answer, Closed, Request, feed, view

HOST = b"Host: a\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
GET = b"GET /next HTTP/1.1\r\n" + HOST + b"\r\n"

TARGETS = (b"/", b"/v1/layer_norm?eps=1e-5", b"/a%20b", b"*", b"http://a/b", b"a:443", b"/\xfc")
LINES = st.sampled_from([b"GET ", b"POST ", b"PUT ", b"CONNECT ", b"OPTIONS ", b"get ", b"PRI "])
VERSIONS = st.sampled_from([b" HTTP/1.1\r\n"] * 8 + [b" HTTP/1.0\r\n", b" HTTP/2.0\r\n", b" HTTP/0.9\r\n", b"\r\n"])
FIELDS = st.sampled_from(
    [
        b"Connection: close\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        UPGRADE,
        b"Expect: 100-continue\r\n",
        b"Authorization: Bearer a\r\n",
        b"X: \r\n",
        b"X: a \t\r\n",
        b"X:" + b"a" * 300 + b"\r\n",
        b" folded: a\r\n",
        b"X: a\n",
        HOST,
    ]
)
SIZES = st.sampled_from([b"0", b"00", b"5", b"0x5", b"fffffffffffffffff", b"7fffffffffffffff", b"-1", b"", b" 5"])
EXTENSIONS = st.sampled_from([b"", b"", b";a=b", b"; a", b";a\n", b' ;q="x"'])
TRAILERS = st.sampled_from([b"Authorization: Bearer x\r\n", b"X: y\r\n", b"GET / HTTP/1.1\r\n", b"X: a\rb\r\n"])


@st.composite
def chunked(draw) -> bytes:
    """A chunked body, mostly a good one."""
    chunks = []
    for data in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=4)):
        size = b"%x" % len(data) if draw(st.integers(0, 19)) else draw(SIZES)
        chunks.append(size + draw(EXTENSIONS) + b"\r\n" + data + b"\r\n")
    trailers = draw(st.lists(TRAILERS, max_size=2))
    return b"".join([*chunks, b"0\r\n", *trailers, b"\r\n"])


@st.composite
def requests(draw) -> bytes:
    """One request, mostly a good one."""
    head = draw(LINES) + draw(st.sampled_from(TARGETS)) + draw(VERSIONS)
    head += b"" if draw(st.integers(0, 9)) == 0 else HOST
    head += b"".join(draw(st.lists(FIELDS, max_size=3)))
    match draw(st.integers(0, 4)):
        case 0:
            return head + b"\r\n"
        case 1:
            body = draw(st.binary(max_size=200))
            return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        case 2:
            return head + b"Content-Length: " + draw(SIZES) + b"\r\n\r\n"
        case 3:
            coding = draw(st.sampled_from([b"chunked"] * 4 + [b"gzip, chunked", b"chunked, chunked", b"identity"]))
            return head + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + draw(chunked())
        case _:
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + draw(chunked())


@st.composite
def streams(draw) -> bytes:
    """What one connection brings: requests behind one another, perhaps damaged somewhere."""
    whole = bytearray(
        draw(st.sampled_from([b"", b"\r\n", b"\r\n\r\n"])).join(draw(st.lists(requests(), max_size=4)))
    )
    for at in draw(st.lists(st.integers(0, max(0, len(whole) - 1)), max_size=2)):
        match draw(st.integers(0, 3)):
            case 0:
                del whole[at : at + 1]
            case 1:
                whole[at:at] = draw(st.sampled_from([b"\r", b"\n", b"\r\n", b"\0", b" ", b"a", b":", b"\r\n\r\n"]))
            case 2:
                del whole[at:]
            case _:
                pass
    return bytes(whole)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [*sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=75)
@given(streams(), st.lists(st.integers(0, 2000), max_size=6), st.booleans())
def test_cuts_make_no_difference(stream, places, settles):
    assert feed(cut(stream, places), settles=settles) == feed([stream])


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
INCOMPLETE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhell"
EXAMPLES = {
    "announced": b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nhello",
    "announced-upgrade": b"POST /a HTTP/1.1\r\n" + HOST + UPGRADE + b"Content-Length: 5\r\n\r\nGET /",
    "chunked": b"POST /a HTTP/1.1\r\n"
    + HOST
    + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x\r\nlo\r\n0\r\n\r\n",
    "chunked-upgrade": b"POST /a HTTP/1.1\r\n"
    + HOST
    + UPGRADE
    + b"Transfer-Encoding: chunked\r\n\r\n5\r\nGET /\r\n0\r\nAuthorization: Bearer x\r\n\r\n",
    "expected-upgrade": b"POST /a HTTP/1.1\r\n"
    + HOST
    + UPGRADE
    + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
    "websocket": b"GET /a HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("settles", [True, False])
def test_one_request_and_the_next_at_every_cut(name, settles):
    stream = EXAMPLES[name] + GET
    body = {"announced-upgrade": b"GET /", "chunked-upgrade": b"GET /", "websocket": b""}.get(name, b"hello")
    whole = view(feed([stream]))
    assert [(each.target, each.body) for each in whole.requests] == [(b"/a", body), (b"/next", b"")]
    assert whole.statuses == [200, 200]
    assert not whole.closed
    for at in range(1, len(stream)):
        assert view(feed([stream[:at], stream[at:]], settles=settles)) == whole


@pytest.mark.parametrize("cut_at", [None, 1, 20, 3])
def test_trailers_are_no_headers(cut_at):
    head = b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    stream = head + b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\nHost: b\r\n\r\n" + GET
    pieces = [stream] if cut_at is None else [stream[at : at + cut_at] for at in range(0, len(stream), cut_at)]
    assert view(feed(pieces)).requests == [
        Request("POST", b"/a", ((b"host", b"a"), (b"transfer-encoding", b"chunked")), b"a"),
        Request("GET", b"/next", ((b"host", b"a"),), b""),
    ]


LIMIT = 64 * 1024


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
@pytest.mark.parametrize("step", [LIMIT * 2, 16 * 1024, 16 * 1024 - 1, 4097, 1000])
@pytest.mark.parametrize("before", [b"", b"\r\n\r\n"])
def test_header_ends_at_its_limit_in_any_cuts(length, step, before):
    head = before + b"GET / HTTP/1.1\r\n" + HOST + b"X: "
    stream = head + b"a" * (length - len(head) - 4) + b"\r\n\r\n"
    result = view(feed([stream[at : at + step] for at in range(0, len(stream), step)], settles=False))
    assert result.statuses == ([200] if length <= LIMIT else [431])


def test_fault_of_a_pipelined_body_is_answered_in_its_turn():
    faulty = b"POST /b HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX"
    for stream in (GET + faulty, GET + GET + faulty):
        result = view(feed([stream]))
        assert result.statuses == [200] * (len(stream) // len(GET) - len(faulty) // len(GET)) + [400]
        assert result.closed


@pytest.mark.parametrize("length", [LIMIT - 200, LIMIT, LIMIT + 1])
@pytest.mark.parametrize("cut_at", [None, 100, 16 * 1024])
def test_headers_that_are_alike_are_requests_of_their_own(length, cut_at):
    head = b"POST /a HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    last = GET[:-2] + b"X: "
    last += b"a" * (length - len(last) - 4) + b"\r\n\r\n"
    stream = head + b"ab" + head + b"cd" + GET + head + b"ef" + last
    step = cut_at or len(stream)
    result = view(feed([stream[at : at + step] for at in range(0, len(stream), step)], settles=cut_at != 100))
    assert [each.body for each in result.requests[:4]] == [b"ab", b"cd", b"", b"ef"]
    assert len({id(each.headers) for each in result.requests}) == len(result.requests)
    assert result.requests[0].headers == result.requests[1].headers == result.requests[3].headers
    assert result.statuses == [200] * 4 + ([200] if length <= LIMIT else [431])


def test_nothing_is_read_behind_a_request_that_closes():
    closing = b"GET /a HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    result = view(feed([closing + GET + b"\0"]))
    assert [each.target for each in result.requests] == [b"/a"]
    assert result.statuses == [200]
    assert result.closed


class TestHalfClosed:
    """A client that ends its side gets the answers to what it has sent whole."""

    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("rest", [b"", b"GET /", INCOMPLETE])
    def test_whole_requests_are_answered(self, count, rest):
        result = view(feed([GET * count + rest], settles=False, ends=True))
        assert result.statuses == [200] * count
        assert result.closed

    @pytest.mark.parametrize("rest", [b"GET /", INCOMPLETE])
    def test_an_incomplete_one_is_not(self, rest):
        result = view(feed([rest], ends=True))
        assert (result.statuses, result.closed) == ([], True)


def test_what_fails_on_our_side_is_not_the_requests_fault(monkeypatch):
    def without_memory(*_):
        raise MemoryError

    monkeypatch.setattr("normserve.http.transport.http_parser_protocol.find_head_fault", without_memory)
    assert feed([GET]) == [Answer(429, "overloaded"), Closed()]


def test_an_application_that_fails_gives_no_answer_in_plain_text(monkeypatch, caplog):
    async def fail(self, scope):
        raise MemoryError

    monkeypatch.setattr("tests.service.http.transport.drive.Application.serve", fail)
    assert feed([GET]) == [Closed()]
