"""The client in C against servers that do as they are told."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serve.clients.c_client import CompiledClient
from benchmarks.serve.programs.build import compile_program
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.server_processes import ServerProcess

CORES = {0}

# Answers the first request when so many have come as it is told, and not before; the first one of each connection
# after so many seconds more, and the others after a tenth of that.
SERVER = """
import asyncio, sys

opened, awaited, status, delay = asyncio.Event(), int(sys.argv[1]), sys.argv[2].encode(), float(sys.argv[3])

async def serve(reader, writer):
    global awaited
    rest = delay
    try:
        while head := await reader.readuntil(b"\\r\\n\\r\\n"):
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\\r\\n")[0])
            await reader.readexactly(length)
            awaited -= 1
            if not awaited:
                opened.set()
            await opened.wait()
            await asyncio.sleep(rest)
            rest = delay / 10
            # In two pieces, the second one in the middle of the body.
            writer.write(b"HTTP/1.1 %s OK\\r\\nContent-Length: 6\\r\\n\\r\\nabc" % status)
            await writer.drain()
            writer.write(b"def")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()

async def main():
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def client(folder) -> CompiledClient:
    return CompiledClient(folder, CORES)


@contextlib.contextmanager
def served(at_once: int, status: str = "200", delay_s: float = 0.0) -> Iterator[ServerProcess]:
    command = [sys.executable, "-c", SERVER, str(at_once), status, str(delay_s)]
    with server_processes.run_process(command, CORES, {}) as running:
        yield ServerProcess("test", running.stdout.readline().strip(), "/", running.pid)


def test_connections_are_asked_side_by_side(client):
    with served(8) as server:
        turn = client.run_turn(server, "a/b", b"1234", 0.1, 8)
    # However long an answer took, a part of it counts.
    assert turn.per_second >= 8 / 60
    assert turn.p50_s > 0
    assert 0 <= turn.client_cores < 8


def test_connections_that_waited_long_do_not_count_as_fast_ones(client):
    # Each connection gets an answer in 0.4 s and then one every 0.04 s at most, of which 0.4 s count.
    with served(1, delay_s=0.4) as server:
        turn = client.run_turn(server, "a/b", b"1234", 0.5, 8)
    assert 0 < turn.per_second <= 8 * (0.75 + 0.1 / 0.04) / 0.4


def test_an_error_is_no_answer(client):
    with served(1, "503") as server, pytest.raises(subprocess.CalledProcessError):
        client.run_turn(server, "a/b", b"", 0.1)


def test_an_echo_gives_everything_back(client, folder):
    with server_processes.run_echo(CORES, compile_program(folder, "echo"), 100_000) as (echoing,):
        assert client.run_turn(echoing, "", bytes(100_000), 0.01).per_second > 0
