"""Containers of the CPU image, localhost/normserve:cpu, which `make image` has built; see .ci/containers."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from .engine import Container

IMAGE = "localhost/normserve:cpu"
_START_S = 120


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/containers/" in item.path.as_posix():
            item.add_marker(pytest.mark.container)


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for something to become true."""

    def wait(condition: Callable[[], bool], patience_s: float = 30) -> None:
        end = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < end, "it never became true"
            time.sleep(0.1)

    return wait


@pytest.fixture
def start(until) -> Iterator[Callable[..., Container]]:
    """Starts a container as a careful operator would, and waits until it is healthy: `start(*flags, image=…)`."""
    with contextlib.ExitStack() as stack:

        def begin(*flags: str, image: str = IMAGE) -> Container:
            container = Container(image, *flags)
            stack.callback(container.remove)
            until(container.is_healthy, _START_S)
            return container

        yield begin
