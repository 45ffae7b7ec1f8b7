"""Frames and their descriptors: what is sent is received, however it is cut, and no descriptor is left open."""

import itertools
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.codec.framing import PREFIX, FrameReader, SendQueue, compute_ancillary_bytes
from normserve.errors import TooLargeError

CONTENTS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=80)), max_size=6)


def frame(tag, content):
    return PREFIX.pack(len(content), tag) + content


def rights(*descriptors):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]


def open_count():
    return len(list(Path("/proc/self/fd").iterdir()))


def null():
    return os.open("/dev/null", os.O_RDONLY)


def cut(stream, places):
    ends = [*sorted(min(place, len(stream)) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize("kind", [bytes, memoryview])
@given(CONTENTS, st.lists(st.integers(0, 500), max_size=8))
def test_frames_survive_however_the_stream_is_cut(kind, sent, places):
    reader, found = FrameReader(80), []
    for piece in cut(b"".join(itertools.starmap(frame, sent)), places):
        # Of a buffer that is used again, as the next piece would overwrite this one.
        buffer = bytearray(piece)
        found += [(tag, bytes(content)) for tag, content in reader.feed(kind(buffer))]
        buffer[:] = bytes(len(buffer))
    assert found == sent
    assert not reader.has_partial_frame


@given(st.lists(st.integers(0, 70), max_size=8), st.integers(1, 60))
def test_no_more_is_kept_than_one_frame(lengths, most):
    reader, found = FrameReader(most), []
    refused = False
    try:
        for byte in b"".join(frame(7, bytes(length)) for length in lengths):
            found += reader.feed(bytes([byte]))
            assert len(reader._partial_frame) < most + PREFIX.size
    except TooLargeError:
        refused = True
    taken = list(itertools.takewhile(lambda length: length <= most, lengths))
    assert found == [(7, bytes(length)) for length in taken]
    assert refused == (len(taken) < len(lengths))


@given(
    st.lists(st.tuples(st.binary(max_size=20), st.integers(0, 3), st.booleans(), st.booleans()), max_size=8),
    st.integers(0, 3),
)
def test_descriptors_at_any_place_are_taken_or_closed(received, most):
    before = open_count()
    reader = FrameReader(16, most)
    try:
        for data, count, was_cut, takes in received:
            ancillary = rights(*[null() for _ in range(count)]) if count else []
            reader.feed(data, ancillary, socket.MSG_CTRUNC if was_cut else 0)
            assert not was_cut
            assert len(reader.descriptors) <= most
            if takes and reader.descriptors:
                os.close(reader.descriptors.popleft())
            reader.close_unclaimed()
            assert not reader.descriptors or reader.has_partial_frame
    except TooLargeError:
        pass
    finally:
        reader.close()
    assert open_count() == before


def test_other_ancillary_data_is_no_descriptor():
    reader = FrameReader(16)
    other = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("3i", 1, 2, 3))
    assert reader.feed(frame(1, b"a"), [other]) == [(1, b"a")]
    assert not reader.descriptors


def test_what_a_socket_sends_in_parts_another_receives_with_its_descriptors():
    before = open_count()
    sent = [(number, os.urandom(3000 * number)) for number in range(1, 30)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        queue, reader, found = SendQueue(), FrameReader(2**20, 30), []
        for tag, content in sent:
            queue.add(frame(tag, content), [null()] if tag % 3 == 0 else [])
        while queue or len(found) < len(sent):
            with suppress(BlockingIOError):
                queue.send_all(ours)
            with suppress(BlockingIOError):
                data, ancillary, flags, _ = theirs.recvmsg(2**16, compute_ancillary_bytes(4))
                for tag, content in reader.feed(data, ancillary, flags):
                    found.append((tag, content))
                    if tag % 3 == 0:
                        os.close(reader.descriptors.popleft())
                reader.close_unclaimed()
    assert found == sent
    assert not reader.descriptors
    assert open_count() == before


def test_frames_that_are_given_up_close_their_descriptors_and_are_reported():
    before = open_count()
    queue, lost = SendQueue(), []
    for number in range(3):
        queue.add(bytes(10), [null()], lambda number=number: lost.append(number))
    taken = iter([10, 4])

    class Full:
        """A socket that takes 14 bytes."""

        def sendmsg(self, buffers, *_):
            for nbytes in taken:
                return nbytes
            raise BlockingIOError

        def send(self, data, flags):
            assert len(data) == 6
            raise BlockingIOError

    with pytest.raises(BlockingIOError):
        queue.send_all(Full())
    assert queue.has_partial_frame
    for on_lost in queue.discard_all():
        on_lost()
    assert lost == [1, 2]
    queue.last_on_lost()
    assert lost == [1, 2, 0]
    assert not queue
    assert open_count() == before
