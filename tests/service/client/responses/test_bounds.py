"""What a client takes of an answer follows from what it asked for."""

import httpx
import pytest
from normserve import client as api
from normserve.client.responses.body_limits import DOCUMENT_BYTES, LIST_BYTES

from tests.service.client.harness.fake_server import HEADERS, FakeServer
from tests.service.client.harness.small_call import ANSWER, OK, RIGHT, TOO_LONG_S, X, either, normalise


def chunked(piece):
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def test_an_answer_over_a_real_connection_is_read(ask, raw_server):
    assert (ask(raw_server([ANSWER]).url, normalise).y == X).all()


def test_a_length_beyond_what_was_asked_for_is_refused_before_a_byte_of_it(ask, raw_server):
    server = raw_server([OK + b"Content-Length: 3000000000\r\n\r\n", lambda connected: server.silence(connected)])
    with pytest.raises(api.UnexpectedAnswerError, match=r"at most \d+ bytes, 3000000000 are announced"):
        ask(server.url, normalise, timeout_s=TOO_LONG_S)


@pytest.mark.parametrize(
    ("head", "piece"),
    [(OK + b"\r\n", b"x" * 2**16), (OK + b"Transfer-Encoding: chunked\r\n\r\n", chunked(b"x" * 2**16))],
    ids=["until-close", "chunked"],
)
def test_a_body_without_end_is_left_at_its_bound(ask, raw_server, head, piece):
    server = raw_server([head, lambda connected: server.flood(piece)(connected)])
    with pytest.raises(api.UnexpectedAnswerError, match="at most 65568 bytes, more came"):
        ask(server.url, normalise, timeout_s=TOO_LONG_S)
    # The bound, and what the kernel's buffers took.
    assert server.taken < 2**25


def test_the_bound_is_exact(ask):
    # The longest header that the codec reads, spaces at its end, and not a byte more than x's shape asks for.
    header = RIGHT[8:-24].rstrip()
    longest = (2**16).to_bytes(8, "little") + header.ljust(2**16) + RIGHT[-24:]
    answers = [httpx.Response(200, headers=HEADERS, content=longest + more) for more in (b"", b"0")]
    assert (ask(FakeServer(answers[0]), normalise).y == X).all()
    with pytest.raises(api.UnexpectedAnswerError, match=f"at most {len(longest)} bytes"):
        ask(FakeServer(answers[1]), normalise)


@pytest.mark.parametrize(
    ("use", "most"),
    [
        (lambda client: client.info(), DOCUMENT_BYTES),
        (lambda client: client.layer("a"), DOCUMENT_BYTES),
        (lambda client: client.put_layer("a", "rms_norm", X[0]), DOCUMENT_BYTES),
        (lambda client: client.delete_layer("a"), DOCUMENT_BYTES),
        (lambda client: client.layers(), LIST_BYTES),
    ],
    ids=["info", "layer", "put_layer", "delete_layer", "layers"],
)
def test_descriptions_are_bounded_too(ask, use, most):
    server = FakeServer(httpx.Response(200, headers={"content-length": str(most + 1)}, content=b""))
    with pytest.raises(api.UnexpectedAnswerError, match=f"at most {most} bytes"):
        ask(server, use)


def test_an_error_whose_text_is_too_long_is_still_that_error(ask, raw_server):
    head = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\n\r\n"
    server = raw_server([head, lambda connected: server.flood()(connected)])
    with pytest.raises(api.UnavailableError) as caught:
        ask(server.url, normalise, timeout_s=TOO_LONG_S)
    assert caught.value.retry_after_s == 3
    assert server.taken < 2**25
    announced = httpx.Response(422, headers={"content-length": "2000000"}, content=b'{"code": "invalid_shape"}')
    with pytest.raises(api.InvalidRequestError) as refused:
        ask(FakeServer(announced), normalise)
    assert refused.value.code == ""


def test_a_problem_document_may_be_longer_than_the_answer_that_was_asked_for(ask):
    document = {"code": "invalid_shape", "detail": "d", "more": "x" * 200_000}
    with pytest.raises(api.InvalidRequestError) as caught:
        ask(FakeServer(httpx.Response(422, json=document)), normalise)
    assert caught.value.code == "invalid_shape"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "GZIP", "identity, gzip", "nonsense"])
def test_a_compressed_answer_is_refused_as_it_is(ask, encoding):
    headers = HEADERS | {"content-encoding": encoding}
    answer = httpx.Response(200, headers=headers, stream=httpx.ByteStream(RIGHT))
    with pytest.raises(api.UnexpectedAnswerError, match="must not be compressed"):
        ask(FakeServer(answer), normalise)
    error = httpx.Response(429, headers={"content-encoding": encoding}, stream=httpx.ByteStream(b"{}"))
    with pytest.raises(api.OverloadedError):
        ask(FakeServer(error), normalise)


def test_identity_is_no_compression(ask):
    answer = httpx.Response(200, headers=HEADERS | {"content-encoding": "Identity"}, content=RIGHT)
    assert (ask(FakeServer(answer), normalise).y == X).all()


def test_the_connection_is_dropped_after_an_answer_that_was_refused(ask, raw_server):
    server = raw_server([OK + b"Content-Length: 99999999\r\n\r\n"], [ANSWER])

    def use(client):
        with pytest.raises(api.UnexpectedAnswerError):
            client.layer_norm(X)
        return client.layer_norm(X)

    async def use_async(client):
        with pytest.raises(api.UnexpectedAnswerError):
            await client.layer_norm(X)
        return await client.layer_norm(X)

    assert (ask(server.url, either(use, use_async), max_connections=1).y == X).all()
    assert len(server.heads) == 2
