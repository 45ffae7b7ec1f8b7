"""Two servers behind each proxy, with the configuration that docs/proxies.md shows."""

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.harness.servers import find_free_port

DOCUMENT = Path(__file__).parents[3] / "docs/proxies.md"
#: Proxies that the document has, by the language of its block.
PROXIES = ("nginx", "haproxy", "caddyfile")
_PATIENCE_S = 60
_OF_NGINX = """\
daemon off;
user root;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
access_log off;
{paths}{text}}}
"""
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def read_configuration(proxy: str) -> str:
    """The only block of a language in the document."""
    (found,) = re.findall(rf"```{proxy}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    return found


@contextlib.contextmanager
def run_proxy(
    proxy: str, tool: Callable[..., str], folder: Path, servers: list[int], change: Callable[[str], str] = str
) -> Iterator[int]:
    """Run a proxy before two servers of this host; the value is its port.

    Args:
        servers: the ports of the servers.
        change: changes the document's configuration.
    """
    port = find_free_port()
    text = change(read_configuration(proxy))
    for address, server in zip(("10.0.0.11:8000", "10.0.0.12:8000"), servers, strict=True):
        assert text.count(address) == 1
        text = text.replace(address, f"127.0.0.1:{server}")
    listening = re.compile(r"(listen |bind :|^:)8080", re.MULTILINE)
    assert len(listening.findall(text)) == 1
    text = listening.sub(rf"\g<1>{port}", text)
    file = folder / "configuration"
    if proxy == "nginx":
        paths = "".join(f"{each}_temp_path {folder}/{each};\n" for each in _TEMPORARY)
        text = _OF_NGINX.format(folder=folder, paths=paths, text=text)
        command = [tool("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(file)]
    elif proxy == "haproxy":
        command = [tool("haproxy"), "-db", "-f", str(file)]
    else:
        text = "{\n    admin off\n}\n" + text
        command = [tool("caddy"), "run", "--adapter", "caddyfile", "--config", str(file)]
    file.write_text(text, encoding="utf-8")
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            command, stdout=log, stderr=log, env={"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/bin"}
        )
    try:
        end = time.monotonic() + _PATIENCE_S
        while True:
            assert running.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, (folder / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port
    finally:
        running.terminate()
        running.wait(20)


@pytest.fixture(scope="module")
def servers(launched):
    options = ("--trusted-proxies", "127.0.0.1", "--allowed-hosts", "norm.example", "--access-log")
    return [launched(*options) for _ in range(2)]


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request, tool, tmp_path_factory, servers):
    """The name and the port of a proxy."""
    ports = [server.address[1] for server in servers]
    with run_proxy(request.param, tool, tmp_path_factory.mktemp(request.param), ports) as port:
        yield request.param, port
