"""Frames: what is written is read, however it is cut, and whatever else comes is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader
from normserve.errors import MalformedPayloadError

WHOLE = st.integers(0, 2**63 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LOCATED = st.builds(frames.TensorReference, WHOLE, WHOLE, NAMES, st.lists(WHOLE, max_size=5).map(tuple))
PLACES = st.builds(frames.SegmentRange, WHOLE, WHOLE, WHOLE)
MESSAGES = st.one_of(
    st.builds(frames.HelloMessage, WHOLE, st.none() | NAMES),
    st.builds(frames.GrowArenaMessage, WHOLE),
    st.builds(frames.FreeSegmentMessage, WHOLE),
    st.builds(frames.CancelRequestMessage, WHOLE),
    st.builds(
        frames.ComputeMessage,
        NAMES,
        st.dictionaries(NAMES, LOCATED, max_size=3),
        st.dictionaries(NAMES, PLACES, max_size=3),
        NAMES,
        NAMES,
    ),
    st.builds(frames.PutLayerMessage, NAMES, NAMES, st.dictionaries(NAMES, LOCATED, max_size=3)),
    st.builds(frames.GetLayerMessage, NAMES),
    st.builds(frames.DeleteLayerMessage, NAMES),
    st.just(frames.ListLayersMessage()),
    st.just(frames.GetInfoMessage()),
)
TAGS = st.integers(0, frames.TAGS - 1)


@given(st.lists(st.tuples(TAGS, MESSAGES), max_size=6), st.lists(st.integers(0, 2000), max_size=8))
def test_messages_survive_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(frames.encode_frame(tag, message) for tag, message in sent)
    incoming = FrameReader(frames.MAX_FRAME_BYTES)
    found, start = [], 0
    for end in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        found += incoming.feed(stream[start:end])
        start = end
    assert [(tag, *frames.decode_messages(content)) for tag, content in found] == sent
    assert not incoming.has_partial_frame


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_an_array_of_messages_is_read_in_its_order(messages):
    ((_, content),) = FrameReader(2**20).feed(frames.encode_frame(1, messages))
    assert list(frames.decode_messages(content)) == messages


@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused(content):
    told = ""
    try:
        messages = frames.decode_messages(content)
    except MalformedPayloadError as error:
        told, messages = error.detail, ()
    assert len(told) < 300
    assert told.isprintable()
    if not messages:
        return
    again = frames.encode_frame(0, list(messages))[frames.PREFIX.size :]
    assert list(frames.decode_messages(again)) == list(messages)


def test_an_answer_whose_results_are_encoded_already_is_an_answer():
    results = {"y": frames.TensorReference(3, 64, "float16", (2, 5))}
    done = frames.ComputeResponse("an-id", msgspec.Raw(msgspec.json.encode(results)), {"recv": 0.5}, 7, 1.5, 2)
    ((tag, content),) = FrameReader(2**20).feed(frames.encode_frame(9, done))
    expected = frames.LocalResponse(200, "an-id", results, {"recv": 0.5}, 7, 1.5, 2)
    assert (tag, frames.decode_response(content)) == (9, expected)


def test_a_reply_is_an_answer_whose_results_are_read_when_asked_for():
    results = {"y": frames.TensorReference(3, 64, "float16", (2, 5))}
    answer = frames.LocalResponse(200, "an-id", results, {"recv": 0.5}, 7, 1.5, 2, 4, "device", 9, [1], {"a": 1}, 3)
    reply = frames.decode_lazy_response(msgspec.json.encode(answer))
    assert frames.decode_results(reply) == frames.decode_results(answer) == results
    told = msgspec.structs.asdict(reply) | {"results": results}
    assert told == msgspec.structs.asdict(answer)
    assert frames.decode_results(frames.decode_lazy_response(b'{"status":200}')) == {}


@pytest.mark.parametrize("results", ["[]", '{"y":{}}', '{"y":{"segment":-1,"offset":0,"dtype":"x","shape":[]}}'])
def test_results_of_a_reply_that_are_none_are_refused_when_asked_for(results):
    reply = frames.decode_lazy_response(f'{{"status":200,"results":{results}}}'.encode())
    with pytest.raises(MalformedPayloadError):
        frames.decode_results(reply)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"status":"200"}', b"[" * 10_000, b'{"status":200,"segment":-1}']
)
def test_what_is_no_answer_is_refused(content):
    with pytest.raises(MalformedPayloadError):
        frames.decode_response(content)
    with pytest.raises(MalformedPayloadError):
        frames.decode_lazy_response(content)
