"""What a server says to a client that shares memory, with descriptors anywhere."""

import os
import socket
import struct
from pathlib import Path

from normserve.client.errors import ClientError
from normserve.client.local.client_protocol import LocalClientProtocol, LocalRequest
from normserve.codec import local_messages as frames

from tests.fuzz.streams import cut

_REQUESTS = (
    frames.GetInfoMessage(),
    frames.GrowArenaMessage(4096),
    frames.ListLayersMessage(),
    frames.GrowArenaMessage(4096),
    frames.HelloMessage(frames.VERSION),
)


def local_replies(data: bytes) -> None:
    """Each request is answered once or the connection fails with a client's error; no descriptor stays open.

    Of the options, bits 0 to 4 say with which pieces a descriptor comes, bit 5 that two come each time, bit 6 that
    others were lost with the last piece.
    """
    pieces, _, options = cut(data)
    before = _open_count()
    protocol = LocalClientProtocol(None)
    woken: list[int] = []
    pending = [protocol.register_request(LocalRequest(message))[0] for message in _REQUESTS]
    for number, each in enumerate(pending):
        each.on_done = lambda number=number: woken.append(number)  # type: ignore[misc]
    for number, piece in enumerate(pieces):
        if protocol.make_failure is not None:
            break
        count = (options >> number & 1) * (1 + (options >> 5 & 1))
        is_cut = bool(options >> 6 & 1) and number == len(pieces) - 1
        ancillary = [_rights(count)] if count else []
        protocol.deliver_responses(piece, ancillary, socket.MSG_CTRUNC if is_cut else 0)
        assert protocol.make_failure is not None or not is_cut
    if protocol.make_failure is not None:
        assert isinstance(protocol.make_failure(), ClientError)
        assert set(woken) == set(range(len(pending)))
    else:
        assert [number for number, each in enumerate(pending) if each.response is not None] == sorted(woken)
    protocol.close_descriptors()
    del protocol, pending
    assert _open_count() == before


def _rights(count: int) -> tuple[int, int, bytes]:
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{count}i", *descriptors)


def _open_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
