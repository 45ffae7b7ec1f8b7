"""The gateway of gRPC that a server has started, or a test."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from tests.integration.harness.forked_workers import GATEWAY_NAME
from tests.integration.harness.preloaded import PreloadedProcess
from tests.integration.harness.servers import ServerProcess

_READY = re.compile(r"gRPC is ready on (\S+),")
_PATIENCE_S = 60


def find_gateway_address(server: ServerProcess, after: int = 0) -> str:
    """HOST:PORT of the server's gateway, once it is ready.

    Args: after: how many gateways of this server were ready before.
    """
    end = time.monotonic() + _PATIENCE_S
    while len(found := _READY.findall(server.log)) <= after:
        assert time.monotonic() < end, server.log
        assert server.process.poll() is None, server.log
        time.sleep(0.02)
    return found[after]


def find_gateway_process(server: ServerProcess) -> int:
    """The process of the server's gateway."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    for each in " ".join(path.read_text(encoding="ascii") for path in children).split():
        process = Path("/proc") / each
        forked = (process / "comm").read_text(encoding="ascii").strip() == GATEWAY_NAME
        if forked or b"gateway_process" in (process / "cmdline").read_bytes():
            return int(each)
    raise AssertionError("there is no gateway")


def launch_gateway(*options: str, env: Mapping[str, str] | None = None) -> ServerProcess:
    """The command, in a process that has imported server and gateway."""
    return ServerProcess(PreloadedProcess(["-m", "normserve", "grpc", *options], env or {}))
