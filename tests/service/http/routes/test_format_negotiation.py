"""Which format answers, beside RFC 9110's words for it: the most specific range says how much a type is wanted."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.codec.media_types import NPY, SAFETENSORS
from normserve.errors import NotAcceptableError
from normserve.http.routes.format_negotiation import AcceptHeader, is_preferred

RANGES = st.sampled_from([NPY, SAFETENSORS, "application/*", "*/*", "text/html", "text/*"])
QUALITIES = st.sampled_from(["0", "0.001", "0.25", "0.5", "0.999", "1", "1.000"])
SPACE = st.sampled_from(["", " ", "\t", "  "])


@st.composite
def accept_headers(draw):
    """A header of distinct media ranges, and what it says about each."""
    ranges = draw(st.lists(RANGES, unique=True, max_size=5))
    said, items = {}, []
    for media_range in ranges:
        quality = draw(st.none() | QUALITIES)
        said[media_range] = 1.0 if quality is None else float(quality)
        name = media_range.upper() if draw(st.booleans()) else media_range
        item = [draw(SPACE), name, draw(SPACE)]
        if draw(st.booleans()):
            item += [";", draw(SPACE), "charset=binary"]
        if quality is not None:
            item += [";", draw(SPACE), draw(st.sampled_from("qQ")), "=", quality]
        items.append("".join(item))
    return ",".join(items), said


def wanted(said: dict[str, float], media_type: str) -> float:
    for media_range in (media_type, "application/*", "*/*"):
        if media_range in said:
            return said[media_range]
    return 0.0


@given(accept_headers(), st.sampled_from([NPY, SAFETENSORS]))
def test_the_most_wanted_format_answers_and_the_requests_own_wins_a_tie(header, request_format):
    text, said = header
    other = SAFETENSORS if request_format == NPY else NPY
    if not said:
        assert AcceptHeader(text).choose_format(request_format) == request_format
    elif wanted(said, request_format) == wanted(said, other) == 0:
        with pytest.raises(NotAcceptableError):
            AcceptHeader(text).choose_format(request_format)
    else:
        best = request_format if wanted(said, request_format) >= wanted(said, other) else other
        assert AcceptHeader(text).choose_format(request_format) == best


@given(st.text(st.characters(codec="latin-1"), max_size=200))
def test_any_header_is_an_answer_or_a_refusal(text):
    with contextlib.suppress(NotAcceptableError):
        assert AcceptHeader(text).choose_format(NPY) in (NPY, SAFETENSORS)


@pytest.mark.parametrize("quality", ["nan", "inf", "-1", "2", "1e400", "", "x", "0x1"])
def test_a_quality_that_is_none_never_wins(quality):
    accepted = AcceptHeader(f"{NPY};q={quality}, {SAFETENSORS};q=1")
    assert accepted.choose_format(SAFETENSORS) == SAFETENSORS


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2", True),
        ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.4,*/*;q=0.3", False),
        (
            "application/openmetrics-text;q=0.2, Application/OpenMetrics-Text ;q=0.4, text/plain;q=0.3",
            True,
        ),
        ("application/openmetrics-text;q=0", False),
        ("text/plain", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_what_is_asked_for_by_name_is_preferred_to_the_default(accept, expected):
    assert is_preferred(accept, "application/openmetrics-text", "text/plain") == expected
