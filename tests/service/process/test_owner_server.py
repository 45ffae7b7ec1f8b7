"""What holds for the whole process that serves."""

import asyncio
import re
import socket
import sys
from pathlib import Path

import pytest
import uvicorn
from normserve.http.app import create_app
from normserve.peers.sibling_processes import FleetPosition, SiblingProcesses
from normserve.process import owner_server
from normserve.process.supervisor_channel import RESTARTED, send_with_socket
from normserve.settings import Settings


@pytest.fixture
def switch_interval():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_a_thread_that_compiles_gives_way_in_time(switch_interval, monkeypatch):
    told = []
    monkeypatch.setattr(owner_server.OwnerServer, "run", lambda self: told.append(sys.getswitchinterval()))
    assert owner_server.run_server(Settings(port=0, backend="torch")) == 0
    assert told == [pytest.approx(0.0005)]


@pytest.fixture
def channel():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        yield here, there


def running_on(channel: socket.socket) -> owner_server.OwnerServer:
    place = FleetPosition(0, 1, "cpu", 2, Path("/"), children=["front end 0", "gateway"])
    app = create_app(Settings(backend="torch"), siblings=SiblingProcesses(place))
    return owner_server.OwnerServer(uvicorn.Config(app, log_config=None), app, [], lambda: None, channel, None)


def test_restarts_of_each_process_of_the_server_are_in_its_metrics(channel):
    async def play() -> set[str]:
        running = running_on(channel[0])
        running._channel.start()
        send_with_socket(channel[1], RESTARTED + 1)
        await asyncio.sleep(0.05)
        text = running._services.metrics.render().decode()
        return set(re.findall(r"^normserve_child_restarts_total(.*)$", text, re.MULTILINE))

    assert asyncio.run(play()) == {
        '{process="0",child="process 0"} 2.0',
        '{process="0",child="front end 0"} 0.0',
        '{process="0",child="gateway"} 1.0',
    }


def test_a_server_that_meets_what_nobody_expected_at_its_start_ends(monkeypatch, switch_interval):
    async def fail(self) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("normserve.http.application_services.ApplicationServices.warm_up_and_accept_jobs", fail)
    assert owner_server.run_server(Settings(port=0, backend="torch")) == 1


def test_a_loop_that_finds_no_memory_ends_the_server_and_any_other_error_does_not(channel, monkeypatch):
    running = running_on(channel[0])

    async def meet(error: Exception) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "default_exception_handler", lambda context: told.append(context))
        running._handle_loop_error(loop, {"message": "a callback failed", "exception": error})
        await asyncio.sleep(0.4)

    told: list[object] = []
    asyncio.run(meet(ValueError("wrong")))
    assert (running.exit_code, running.should_exit, len(told)) == (0, False, 1)
    asyncio.run(meet(MemoryError()))
    assert (running.exit_code, running.should_exit, len(told)) == (1, True, 1)
