"""A chunked body is its data, whatever surrounds it, and what surrounds it is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.errors import HeadersTooLargeError, MalformedHttpError, NormserveError
from normserve.http.transport.chunked_body import ChunkedBodyDecoder


def taken(stream: bytes, *places: int) -> tuple[bytes, int, type[NormserveError] | None, bool]:
    """The data, how many bytes belonged to the body, what was raised, and whether it is complete."""
    body, data, used = ChunkedBodyDecoder(), b"", 0
    ends = [*sorted(places), len(stream)]
    for start, end in zip([0, *ends], ends, strict=False):
        try:
            piece, length = body.decode(stream[start:end])
        except NormserveError as error:
            return b"", 0, type(error), False
        data, used = data + piece, used + length
        if body.is_complete:
            break
    return data, used, None, body.is_complete


@pytest.mark.parametrize(
    "stream",
    [
        b"5\r\nhello\r\n0\r\n\r\n",
        b"3\r\nhel\r\n2\r\nlo\r\n00\r\n\r\n",
        b'5;a;b="c d"\r\nhello\r\n0;x\r\n\r\n',
        b"000000005\r\nhello\r\n0\r\nA: b\r\nC:\r\n\r\n",
    ],
)
def test_data(stream):
    assert taken(stream + b"GET") == (b"hello", len(stream), None, True)


@pytest.mark.parametrize(
    "stream",
    [
        b"\r\n",
        b"g\r\n",
        b"0x5\r\n",
        b" 5\r\n",
        b"5 \r\n",
        b"+5\r\n",
        b"-5\r\n",
        b"1_0\r\n",
        b"5\n",
        b"5\r\r\n",
        b"5;a\n",
        b"5;a\rb\r\n",
        b"5;\0\r\n",
        b"1000000000000000\r\n",
        b"5\r\nhelloX",
        b"5\r\nhello\n",
        b"5\r\nhello\rX",
        b"0\r\nGET / HTTP/1.1\r\n",
        b"0\r\n folded: a\r\n",
        b"0\r\nA : b\r\n",
        b"0\r\nA: b\n",
        b"0\r\nA: \0\r\n",
        b"0\r\n: a\r\n",
    ],
)
def test_what_is_no_chunk(stream):
    assert taken(stream)[2] is MalformedHttpError


@given(
    st.lists(
        st.sampled_from(
            [b"1\r\na\r\n", b"5\r\nhello\r\n", b"0", b"\r", b"\n", b"\r\n", b"A: b\r\n", b";x", b"f", b"a"]
        ),
        max_size=12,
    ).map(b"".join),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_cuts_make_no_difference(stream, places):
    assert taken(stream, *(min(place, len(stream)) for place in places)) == taken(stream)


LINE, TRAILERS = 4096, 16 * 1024


@pytest.mark.parametrize("cut", [10, LINE - 1, LINE, LINE + 3])
@pytest.mark.parametrize(("length", "error"), [(LINE, None), (LINE + 1, MalformedHttpError)])
def test_lines_are_bounded(cut, length, error):
    line = b"1;" + b"a" * (length - 4) + b"\r\n"
    assert taken(line + b"x\r\n", min(cut, len(line)))[2] is error


@pytest.mark.parametrize("step", [1, 1000, 10**6])
@pytest.mark.parametrize(("length", "error"), [(TRAILERS, None), (TRAILERS + 1, HeadersTooLargeError)])
def test_trailer_section_is_bounded(step, length, error):
    line = b"A: " + b"b" * 95 + b"\r\n"
    section = line * (length // len(line) - 1)
    section += b"A:" + b"b" * (length - len(section) - 6) + b"\r\n\r\n"
    assert len(section) == length
    stream = b"0\r\n" + section
    got = taken(stream, *range(step, len(stream), step))
    assert got[2] is error
    assert got[3] is (error is None)


def test_chunks_of_one_byte_are_taken():
    assert taken(b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")[0] == b"x" * 100_000


@pytest.mark.parametrize("padded", [b"0000000001\r\nx\r\n", b"1;abcdefgh\r\nx\r\n"])
def test_framing_has_its_share_of_the_data(padded):
    assert taken(padded * 1000)[2] is None
    assert taken(padded * 100_000)[2] is MalformedHttpError
    # Beside data of any length it counts for little.
    assert taken((padded + b"4000\r\n" + bytes(0x4000) + b"\r\n") * 100)[2] is None
