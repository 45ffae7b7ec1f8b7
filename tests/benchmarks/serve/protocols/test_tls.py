"""TLS beside plain TCP: what one answer is, and the table."""

import socket
import threading

import pytest

from benchmarks.serve.protocols.tls import RepeatedRequest, format_table


def row(transport, p50, ratio, size="4 KiB"):
    return {"size": size, "transport": transport, "p50_ms": p50, "p50_over_tcp": ratio}


def test_table_has_medians_over_rounds():
    rows = [row("tcp", "1.0", "1.0"), row("tls", "2.0", "2.0")] * 2 + [
        row("tcp", "4.0", "1.0"),
        row("tls", "6.0", "1.5"),
    ]
    assert format_table(rows).splitlines()[2:] == ["| 4 KiB | 1 | 2 | 2.00 (1.50 to 2.00) |"]


@pytest.mark.parametrize("cuts", [[], [5], [40, 60], list(range(1, 80))])
def test_an_answer_is_read_whole_however_it_comes(cuts):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\nx: y\r\n\r\n" + bytes(range(40))
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def serve():
            theirs.recv(100)
            for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True):
                theirs.sendall(answer[start:end])

        thread = threading.Thread(target=serve)
        thread.start()
        assert bytes(RepeatedRequest(ours, b"request", 40).send()) == bytes(range(40))
        thread.join()


def test_half_an_answer_is_an_error():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(RuntimeError, match="closed"):
            RepeatedRequest(ours, b"", 40).send()


def test_a_refusal_is_an_error():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")
        with pytest.raises(RuntimeError, match="429"):
            RepeatedRequest(ours, b"request", 40).send()
