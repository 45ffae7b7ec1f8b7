"""The exit code of several processes, which of their ends is the end of all, and who is told to stop when."""

import asyncio
import os
import signal
import socket

import pytest
from normserve.process import supervisor
from normserve.process.supervisor import Fleet
from normserve.settings import Settings

from tests.service.process.fake_processes import FakeProcesses


@pytest.fixture
def fleet(tmp_path):
    return Fleet(Settings(devices="cpu,cpu"), tmp_path)


def end_with(fleet: Fleet, code: int, *, was_told: bool, was_ready: bool = False) -> int:
    """The exit code of the fleet after its first process has ended with a code."""
    process = fleet._owners[0]

    async def run() -> int:
        if was_told:
            fleet._end()
        if was_ready:
            process.was_ready.set()
        return code

    process.run = run
    asyncio.run(asyncio.wait_for(fleet._keep(process), 10))
    assert fleet._ending.is_set()
    return fleet._exit_code


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, 0), (-signal.SIGTERM, 0), (-signal.SIGKILL, 1), (-signal.SIGABRT, 1), (1, 1), (2, 2), (3, 1)],
)
def test_a_process_that_starts_when_all_are_told_to_stop_may_have_no_handler(fleet, code, expected):
    assert end_with(fleet, code, was_told=True) == expected


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (-signal.SIGTERM, 1), (-signal.SIGSEGV, 1)])
def test_a_process_that_cannot_start_ends_all_with_its_code(fleet, code, expected):
    assert end_with(fleet, code, was_told=False) == expected


def test_one_that_was_ready_and_can_start_no_more_ends_all_if_no_other_serves(fleet):
    assert end_with(fleet, 2, was_told=False, was_ready=True) == 2


@pytest.mark.parametrize("later", [0, 1, -signal.SIGTERM])
def test_the_first_that_failed_decides(fleet, later):
    async def end_later() -> int:
        await fleet._ending.wait()
        return later

    async def run() -> None:
        fleet._owners[0].run, fleet._owners[1].run = fail, end_later
        await asyncio.wait_for(asyncio.gather(*map(fleet._keep, fleet._owners)), 10)

    async def fail() -> int:
        return 2

    asyncio.run(run())
    assert fleet._exit_code == 2


@pytest.fixture
def processes(tmp_path, monkeypatch):
    return FakeProcesses(tmp_path, monkeypatch)


def settings_for(owners: int, **more) -> Settings:
    return Settings(devices=",".join(["cpu"] * owners), port=0, **more)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_code_of_a_process_that_was_told_to_stop_is_the_servers(processes, code):
    processes.let("owner", f"def at_signal(): sys.exit({code})")
    assert processes.run(settings_for(1), lambda: processes.until("owner ready")) == code


def test_a_process_that_hangs_is_killed_and_started_again(processes, caplog):
    processes.let("owner", "if not count('ready'): note('ready'); send(READY); time.sleep(60)")

    async def play() -> None:
        await processes.until("owner ready", 2)

    assert processes.run(settings_for(1, hang_s=0.5), play) == 0
    said = [record.getMessage() for record in caplog.records]
    assert any("has given no sign" in each and "is killed" in each for each in said)
    assert processes.journal[:2] == ["owner ready"] * 2


def test_front_ends_are_linked_and_told_to_stop_once_the_owners_have_ended(processes):
    processes.let("owner", "def at_signal(): beat(0.1); note('ends'); sys.exit(0)")

    async def play() -> None:
        for role in ("owner", "front_end"):
            await processes.until(f"{role} linked")

    assert processes.run(settings_for(1, frontends="1"), play) == 0
    assert processes.journal[-3:] == ["owner told", "owner ends", "front_end told"]


def test_the_second_signal_is_for_all(processes):
    processes.let("owner", "def at_signal(): count('told') > 1 and sys.exit(0)")

    async def play() -> None:
        for role in ("owner", "front_end"):
            await processes.until(f"{role} ready")
        os.kill(os.getpid(), signal.SIGTERM)
        await processes.until("owner told")
        assert "front_end told" not in processes.journal

    assert processes.run(settings_for(1, frontends="1"), play) == 0
    assert processes.journal.count("owner told") == 2
    assert "front_end told" in processes.journal


def test_connections_are_spread_evenly_and_closed_with_their_process_s_end_of_them(processes, monkeypatch):
    listeners = []
    url_of = supervisor.url_of
    monkeypatch.setattr(
        supervisor, "url_of", lambda listener, **more: (listeners.append(listener), url_of(listener, **more))[1]
    )

    def served_by(address) -> bytes:
        with socket.create_connection(address, timeout=10) as client:
            said = client.recv(100)
            # No process keeps a copy of it.
            assert client.recv(1) == b""
            return said

    async def play() -> None:
        while not listeners:
            await asyncio.sleep(0.005)
        address = listeners[0].getsockname()
        by = [await asyncio.to_thread(served_by, address) for _ in range(4)]
        assert sorted(map(by.count, by)) == [2, 2, 2, 2]

    assert processes.run(settings_for(2), play) == 0
