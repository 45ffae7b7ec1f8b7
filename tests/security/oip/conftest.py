"""A server that takes shared memory, and files of it."""

import contextlib
import functools
from pathlib import Path

import numpy as np
import pytest

from tests.integration.harness.wire import assert_alive
from tests.security.oip.regions import (
    MIB,
    PREFIX,
    SHARED_MEMORY,
    held,
)


@pytest.fixture(scope="module")
def sharing(launched, tmp_path_factory):
    socket = tmp_path_factory.mktemp("local") / "normserve.sock"
    return launched(
        "--oip-shared-memory", PREFIX, "--oip-shared-memory-bytes", str(64 * MIB), "--local", str(socket)
    )


@pytest.fixture(scope="module")
def at_rest(sharing, settled):
    """A client, and what the server holds for it alone."""
    with sharing.client() as client:
        assert_alive(client)
        yield client, settled(functools.partial(held, sharing, client))


@pytest.fixture
def http(sharing, at_rest, until):
    """A client; in the end the server holds what it held before, and answers."""
    client, before = at_rest
    yield client
    assert client.post("/v2/systemsharedmemory/unregister").status_code == 200
    assert_alive(client)
    until(lambda: held(sharing, client) == before)


@pytest.fixture
def made():
    """Makes files of shared memory, which end with the test."""
    paths = []

    def make(name: str = "a", content: bytes | None = bytes(4096)) -> Path:
        path = SHARED_MEMORY / f"{PREFIX}{name}"
        paths.append(path)
        if content is not None:
            path.write_bytes(content)
        return path

    yield make
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def row(made):
    x = np.linspace(-1, 1, 1024, dtype=np.float32)
    return made(content=x.tobytes())
