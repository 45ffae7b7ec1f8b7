"""Frames: what is written is read, however it is cut, and whatever else comes is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.codec import local_frames as frames
from normserve.codec.framing import FrameReader
from normserve.errors import MalformedPayloadError

WHOLE = st.integers(0, 2**63 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LOCATED = st.builds(frames.Located, WHOLE, WHOLE, NAMES, st.lists(WHOLE, max_size=5).map(tuple))
PLACES = st.builds(frames.Place, WHOLE, WHOLE, WHOLE)
MESSAGES = st.one_of(
    st.builds(frames.Hello, WHOLE, st.none() | NAMES),
    st.builds(frames.Grow, WHOLE),
    st.builds(frames.Free, WHOLE),
    st.builds(frames.Cancel, WHOLE),
    st.builds(
        frames.Compute,
        NAMES,
        st.dictionaries(NAMES, LOCATED, max_size=3),
        st.dictionaries(NAMES, PLACES, max_size=3),
        NAMES,
        NAMES,
    ),
    st.builds(frames.PutLayer, NAMES, NAMES, st.dictionaries(NAMES, LOCATED, max_size=3)),
    st.builds(frames.Layer, NAMES),
    st.builds(frames.DeleteLayer, NAMES),
    st.just(frames.Layers()),
    st.just(frames.Info()),
)
TAGS = st.integers(0, frames.TAGS - 1)


@given(st.lists(st.tuples(TAGS, MESSAGES), max_size=6), st.lists(st.integers(0, 2000), max_size=8))
def test_messages_survive_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(frames.write(tag, message) for tag, message in sent)
    incoming = FrameReader(frames.MAX_FRAME_BYTES)
    found, start = [], 0
    for end in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        found += incoming.feed(stream[start:end])
        start = end
    assert [(tag, *frames.read_messages(content)) for tag, content in found] == sent
    assert not incoming.is_within


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_an_array_of_messages_is_read_in_its_order(messages):
    ((_, content),) = FrameReader(2**20).feed(frames.write(1, messages))
    assert list(frames.read_messages(content)) == messages


@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused(content):
    told = ""
    try:
        messages = frames.read_messages(content)
    except MalformedPayloadError as error:
        told, messages = error.detail, ()
    assert len(told) < 300
    assert told.isprintable()
    if not messages:
        return
    again = frames.write(0, list(messages))[frames.PREFIX.size :]
    assert list(frames.read_messages(again)) == list(messages)


def test_an_answer_whose_results_are_encoded_already_is_an_answer():
    results = {"y": frames.Located(3, 64, "float16", (2, 5))}
    done = frames.Done("an-id", msgspec.Raw(msgspec.json.encode(results)), {"recv": 0.5}, 7, 1.5, 2)
    ((tag, content),) = FrameReader(2**20).feed(frames.write(9, done))
    expected = frames.Answer(200, "an-id", results, {"recv": 0.5}, 7, 1.5, 2)
    assert (tag, frames.read_answer(content)) == (9, expected)


def test_a_reply_is_an_answer_whose_results_are_read_when_asked_for():
    results = {"y": frames.Located(3, 64, "float16", (2, 5))}
    answer = frames.Answer(200, "an-id", results, {"recv": 0.5}, 7, 1.5, 2, 4, "device", 9, [1], {"a": 1}, 3)
    reply = frames.read_reply(msgspec.json.encode(answer))
    assert frames.read_results(reply) == frames.read_results(answer) == results
    told = msgspec.structs.asdict(reply) | {"results": results}
    assert told == msgspec.structs.asdict(answer)
    assert frames.read_results(frames.read_reply(b'{"status":200}')) == {}


@pytest.mark.parametrize("results", ["[]", '{"y":{}}', '{"y":{"segment":-1,"offset":0,"dtype":"x","shape":[]}}'])
def test_results_of_a_reply_that_are_none_are_refused_when_asked_for(results):
    reply = frames.read_reply(f'{{"status":200,"results":{results}}}'.encode())
    with pytest.raises(MalformedPayloadError):
        frames.read_results(reply)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"status":"200"}', b"[" * 10_000, b'{"status":200,"segment":-1}']
)
def test_what_is_no_answer_is_refused(content):
    with pytest.raises(MalformedPayloadError):
        frames.read_answer(content)
    with pytest.raises(MalformedPayloadError):
        frames.read_reply(content)
