"""The client's side of a connection, without a socket: requests, responses, and segments that come with them."""

import fcntl
import gc
import os
import socket
import struct
from pathlib import Path

import pytest
from normserve.client.errors import ApiError, ConnectionFailedError, UnexpectedAnswerError
from normserve.client.local.client_protocol import LocalClientProtocol, LocalRequest
from normserve.client.responses.body_limits import DOCUMENT_BYTES
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader

SEGMENT = 2**20


def rights(*descriptors):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]


def memory(nbytes=SEGMENT):
    """The descriptor of new memory, which is not allocated yet."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.fixture
def descriptors():
    """How many descriptors this process has; as many when the test is over."""

    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    # What other tests left.
    gc.collect()
    before = count()
    yield count
    gc.collect()
    assert count() == before


@pytest.fixture
def protocol(descriptors):
    made = LocalClientProtocol(None)
    yield made
    made.close_descriptors()
    made.arena._segments.clear()


@pytest.fixture
def growing(protocol):
    """A protocol that has requested a segment, and that request."""
    pending, _ = protocol.register_request(LocalRequest(frames.GrowArenaMessage(SEGMENT)))
    return protocol, pending


def answer(protocol, pending, answered, count=0, part=slice(None), nbytes=SEGMENT, flags=0):
    """Receive an answer, or a part of it, with so many segments; return whether a request was answered."""
    ancillary = rights(*[memory(nbytes) for _ in range(count)]) if count else []
    return protocol.deliver_responses(frames.encode_frame(pending.tag, answered)[part], ancillary, flags)


def raised(protocol):
    """The error with which the protocol has failed."""
    assert protocol.make_failure is not None
    return protocol.make_failure()


def begun(protocol, message=None):
    return protocol.register_request(LocalRequest(frames.GetInfoMessage() if message is None else message))[0]


def test_answers_in_any_order_belong_to_their_requests(protocol):
    first, second = begun(protocol), begun(protocol)
    assert answer(protocol, second, frames.LocalResponse(200, document=2))
    assert first.response is None
    assert answer(protocol, first, frames.LocalResponse(200, document=1))
    assert (first.response.document, second.response.document) == (1, 2)
    assert not protocol.has_pending


def test_who_waits_is_woken_by_the_answer_and_by_the_end(protocol):
    woken = []
    pending = [begun(protocol) for _ in range(2)]
    for number, each in enumerate(pending):
        each.on_done = lambda number=number: woken.append(number)
    answer(protocol, pending[1], frames.LocalResponse(200))
    assert woken == [1]
    protocol.deliver_responses(b"", [], 0)
    assert woken == [1, 0]
    assert isinstance(raised(protocol), ConnectionFailedError)


def test_what_a_request_uses_is_kept_until_its_answer_though_nobody_waits(protocol):
    class Used:
        pass

    used = Used()
    pending, _ = protocol.register_request(LocalRequest(frames.GetInfoMessage(), used))
    ((_, content),) = FrameReader(2**20).feed(protocol.encode_cancel(pending))
    assert frames.decode_messages(content) == (frames.CancelRequestMessage(pending.tag),)
    assert pending.retained is used
    protocol.release_pending_memory()
    assert pending.retained is None


def test_segments_are_freed_before_the_request_that_wants_others(protocol):
    pending, data = protocol.register_request(LocalRequest(frames.GrowArenaMessage(SEGMENT), freed_segments=(3, 4)))
    sent = [(tag, *frames.decode_messages(content)) for tag, content in FrameReader(2**20).feed(data)]
    assert sent == [
        (0, frames.FreeSegmentMessage(3)),
        (0, frames.FreeSegmentMessage(4)),
        (pending.tag, frames.GrowArenaMessage(SEGMENT)),
    ]


def test_a_refusal_of_the_connection_is_the_error_of_all_requests(protocol):
    pending = begun(protocol)
    assert not protocol.deliver_responses(
        frames.encode_frame(0, frames.LocalResponse(403, problem={"code": "forbidden"})), [], 0
    )
    assert pending.response is None
    first, second = raised(protocol), raised(protocol)
    assert isinstance(first, ApiError)
    assert first.code == "forbidden"
    assert first is not second


def test_the_first_failure_stays(protocol):
    protocol.deliver_responses(b"", [], 0)
    protocol.deliver_responses(frames.PREFIX.pack(2, 1) + b"no", [], 0)
    assert isinstance(raised(protocol), ConnectionFailedError)


def test_of_a_segment_only_what_was_requested_is_mapped(growing):
    protocol, pending = growing
    # More than any machine has: it is neither allocated nor mapped.
    assert answer(protocol, pending, frames.LocalResponse(200, segment=0), 1, nbytes=2**40)
    assert protocol.arena.nbytes == SEGMENT


@pytest.mark.parametrize(
    ("tag", "answered", "count", "nbytes"),
    [
        (None, frames.LocalResponse(200, segment=0), 1, SEGMENT - 4096),
        (None, frames.LocalResponse(200, segment=0), 0, SEGMENT),
        (None, frames.LocalResponse(200, segment=0), 2, SEGMENT),
        (8, frames.LocalResponse(200, segment=0), 1, SEGMENT),
        (0, frames.LocalResponse(200, segment=0), 1, SEGMENT),
        (None, frames.LocalResponse(200, segment=0, device="ab", nbytes=SEGMENT), 1, SEGMENT),
        (None, frames.LocalResponse(200), 1, SEGMENT),
    ],
    ids=["smaller", "without", "two", "another tag", "no tag", "on a device", "no number"],
)
def test_segments_that_were_not_requested_are_refused(growing, tag, answered, count, nbytes):
    protocol, pending = growing
    pending.tag = pending.tag if tag is None else tag
    assert not answer(protocol, pending, answered, count, nbytes=nbytes)
    assert isinstance(raised(protocol), UnexpectedAnswerError)
    assert protocol.arena.nbytes == 0


def test_the_descriptor_of_an_answer_without_a_segment_is_closed(growing, descriptors):
    protocol, pending = growing
    before = descriptors()
    assert answer(protocol, pending, frames.LocalResponse(429), 1)
    assert descriptors() == before
    # The request is answered: what comes later is another's.
    assert not answer(protocol, pending, frames.LocalResponse(200, segment=0), 1)
    assert "requested" in str(raised(protocol))


def test_a_segment_is_taken_once_for_each_request(growing):
    protocol, pending = growing
    assert answer(protocol, pending, frames.LocalResponse(200, segment=0), 1)
    assert not answer(protocol, pending, frames.LocalResponse(200, segment=1), 1)
    assert isinstance(raised(protocol), UnexpectedAnswerError)
    assert protocol.arena.nbytes == SEGMENT


def test_descriptors_that_come_with_parts_of_an_answer_do_not_pile_up(growing, descriptors):
    protocol, pending = growing
    before = descriptors()
    answered = frames.LocalResponse(200, "x" * 100, segment=0)
    assert not answer(protocol, pending, answered, 1, part=slice(0, 1))
    assert descriptors() == before + 1
    assert not answer(protocol, pending, answered, 1, part=slice(1, 2))
    assert "requested" in str(raised(protocol))
    assert descriptors() == before


def test_an_answer_whose_descriptor_was_lost_is_none(growing):
    protocol, pending = growing
    assert not answer(protocol, pending, frames.LocalResponse(200, segment=0), flags=socket.MSG_CTRUNC)
    assert isinstance(raised(protocol), UnexpectedAnswerError)


def test_only_a_list_may_be_long(protocol):
    head = frames.PREFIX.pack(DOCUMENT_BYTES + 1, 9)
    begun(protocol, frames.ListLayersMessage())
    protocol.deliver_responses(head, [], 0)
    assert protocol.make_failure is None
    other = LocalClientProtocol(None)
    begun(other)
    other.deliver_responses(head, [], 0)
    assert "at most" in str(raised(other))


def test_a_segment_on_a_device_is_no_smaller_than_requested(protocol):
    opened = []
    protocol._device_offer.add_device_segment = lambda number, descriptor, nbytes: opened.append((number, nbytes))
    first, second = [begun(protocol, frames.GrowArenaMessage(SEGMENT, "device")) for _ in range(2)]
    assert answer(protocol, first, frames.LocalResponse(200, segment=0, device="ab", nbytes=2 * SEGMENT), 1)
    assert opened == [(0, 2 * SEGMENT)]
    assert not answer(protocol, second, frames.LocalResponse(200, segment=1, device="ab", nbytes=SEGMENT - 1), 1)
    assert "at least" in str(raised(protocol))


def test_http_in_place_of_frames_is_named():
    protocol = LocalClientProtocol(None)
    protocol.deliver_responses(b"HTTP/1.1 400 Bad Request\r\n", [], 0)
    assert str(protocol.make_failure()).endswith("the socket speaks HTTP, use http+unix://PATH")
