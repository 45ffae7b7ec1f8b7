"""The gateway's process is started again when it ends, but not if it cannot start."""

import asyncio
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys

import pytest
from normserve.grpc.gateway_settings import GatewaySettings
from normserve.process import gateway_process
from normserve.process.exit_codes import ExitCode
from normserve.process.gateway_process import (
    GatewayProcess,
    end_gateway,
    limit_gateway_connections,
    make_gateway_process,
)
from normserve.settings import Settings

# Notes each start, and ends as the line for this start says.
PROGRAM = """
import pathlib, pickle, signal, sys, time

pickle.load(sys.stdin.buffer)
journal = pathlib.Path(__file__).with_name("journal")
starts = len(journal.read_text()) if journal.exists() else 0
journal.write_text("+" * (starts + 1))
ends = {ends!r}
if starts < len(ends):
    sys.exit(ends[starts])
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
time.sleep(60)
"""


@pytest.fixture
def make_process(tmp_path, monkeypatch):
    """Makes a process that ends with these codes, one at each start, and then stays."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gateway_process, "_MODULE", "fake_gateway")
    monkeypatch.setattr(gateway_process, "_FIRST_PAUSE_S", 0.01)

    def make(*ends):
        (tmp_path / "fake_gateway.py").write_text(PROGRAM.format(ends=ends))
        return GatewayProcess(GatewaySettings.from_settings(Settings(), "127.0.0.1:0", "http+unix:///nowhere"))

    return make


@pytest.fixture
def wait_for_starts(tmp_path):
    async def wait(count):
        journal = tmp_path / "journal"
        while not journal.exists() or len(journal.read_text()) < count:
            await asyncio.sleep(0.01)

    return wait


def test_one_that_ends_is_started_again(make_process, wait_for_starts):
    async def run():
        gateway, restarts = make_process(1, 0), []
        gateway.on_restarted = lambda: restarts.append(1)
        running = asyncio.create_task(gateway.keep_running())
        await wait_for_starts(3)
        await end_gateway(gateway, running)
        assert running.done()
        assert len(restarts) == 2

    asyncio.run(run())


def test_an_end_is_logged_with_its_process_and_signal(make_process, wait_for_starts, caplog):
    async def run():
        gateway = make_process()
        running = asyncio.create_task(gateway.keep_running())
        await wait_for_starts(1)
        pid = gateway._subprocess.pid
        os.kill(pid, signal.SIGKILL)
        await wait_for_starts(2)
        await end_gateway(gateway, running)
        (record,) = caplog.records
        assert record.getMessage().startswith("gateway ended and is started again in ")
        assert record.fields == {"child": "gateway", "pid": pid, "signal": "SIGKILL"}

    asyncio.run(run())


def test_one_that_cannot_start_is_reported_once(make_process):
    async def run():
        gateway, reports = make_process(2), []
        gateway.on_misconfigured = lambda: reports.append(1)
        await gateway.keep_running()
        assert reports == [1]

    asyncio.run(run())


def test_a_later_one_is_tried_again_whatever_its_end(make_process, wait_for_starts):
    async def run():
        gateway, reports = make_process(1, 2), []
        gateway.on_misconfigured = lambda: reports.append(1)
        running = asyncio.create_task(gateway.keep_running())
        await wait_for_starts(3)
        await end_gateway(gateway, running)
        assert not reports

    asyncio.run(run())


def test_there_is_none_without_a_port():
    assert make_gateway_process(Settings(), []) is None


@pytest.mark.parametrize(
    ("host", "listen"), [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("", "[::]:7"), ("::", "[::]:7")]
)
def test_it_listens_where_the_server_does_and_asks_its_unix_socket(tmp_path, monkeypatch, host, listen):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        listener.bind("http.sock")
        made = make_gateway_process(Settings(host=host, grpc_port=7), [other, listener])
    assert made is not None
    assert (made._settings.listen, made._settings.server) == (listen, "http+unix://http.sock")


def test_a_gateway_has_as_many_connections_as_its_open_files_allow(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    settings = GatewaySettings.from_settings(Settings(max_connections=4096), "127.0.0.1:0", "http://127.0.0.1:1")
    assert limit_gateway_connections(settings).max_connections == 512


def test_the_process_logs_under_the_name_of_its_module():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = GatewaySettings.from_settings(Settings(log_format="json"), listen, "http+unix:///nowhere")
        command = [sys.executable, "-m", gateway_process.__name__]
        done = subprocess.run(command, input=pickle.dumps(settings), capture_output=True, check=False)
    assert done.returncode == ExitCode.MISCONFIGURED
    assert json.loads(done.stderr.splitlines()[-1])["logger"] == gateway_process.__name__
