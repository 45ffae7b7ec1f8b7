"""A program and its server in two containers: they share memory and the volume of a socket, and no network."""

import contextlib
import os
import re
from pathlib import Path

import pytest

from .conftest import IMAGE
from .engine import CAREFUL, podman

PROGRAM = Path(__file__).parents[2] / "docker/k8s/sidecar/client.py"
SOCKET = "/run/normserve/normserve.sock"
USER = ("--user", "10001:10001")
STRANGER = """
import sys
from normserve.client import ApiError, Client
try:
    Client(sys.argv[1]).info()
except ApiError as error:
    print(error.status)
"""


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    """A folder of the server's user alone, which both mount."""
    folder = tmp_path_factory.mktemp("socket")
    if os.geteuid() == 0:
        os.chown(folder, 10001, 10001)
    else:
        folder.chmod(0o777)
    return folder


@pytest.fixture(scope="module")
def server(volume, until):
    options = (
        "--network",
        "none",
        *USER,
        "--env",
        f"NORMSERVE_LOCAL={SOCKET}",
        "--volume",
        f"{volume}:/run/normserve",
    )
    started = podman("run", "--detach", *CAREFUL, *options, IMAGE)
    try:
        until(lambda: is_healthy(started), 120)
        yield started
    finally:
        podman("rm", "--force", "--time", "0", started)


def is_healthy(container: str) -> bool:
    with contextlib.suppress(AssertionError):
        podman("healthcheck", "run", container)
        return True
    return False


def beside(volume: Path, *flags: str) -> tuple[str, ...]:
    """How a container is started that has the socket, and shares no namespace with the server's."""
    mounted = ("--volume", f"{volume}:/run/normserve:ro")
    return (*CAREFUL, "--network", "none", "--ipc", "private", *mounted, "--entrypoint", "python", *flags, IMAGE)


def test_a_program_in_another_container_computes(server, volume, until):
    flags = ("--volume", f"{PROGRAM}:/opt/client.py:ro", "--env", f"NORMALISE_AT=unix://{SOCKET}", *USER)
    program = podman("run", "--detach", *beside(volume, *flags), "/opt/client.py")
    try:
        until(lambda: re.search(r"GB/s, deviation 1\.000", podman("logs", program)) is not None)
        # At any moment of a call.
        podman("kill", "--signal", "KILL", program)
        assert podman("wait", program) == "137"
    finally:
        podman("rm", "--force", "--time", "0", program)
    assert is_healthy(server)


def test_another_user_is_not_admitted(server, volume):
    flags = ("--user", "0:0", "--cap-add", "DAC_OVERRIDE")
    said = podman("run", "--rm", *beside(volume, *flags), "-c", STRANGER, f"unix://{SOCKET}")
    assert said == "403"
