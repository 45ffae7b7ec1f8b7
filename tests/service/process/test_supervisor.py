"""The exit code of several processes, which of their ends is the end of all, and who is told to stop when."""

import asyncio
import os
import signal
import socket
import tempfile
import time
from itertools import pairwise

import pytest
from normserve.process import supervisor
from normserve.process.exit_codes import ExitCode
from normserve.process.supervisor import FleetSupervisor, list_children, serve_fleet
from normserve.process.supervisor_channel import REFUSED, RESTARTED
from normserve.settings import Settings

from tests.service.process.fake_processes import FakeProcesses


@pytest.fixture
def fleet(tmp_path):
    return FleetSupervisor(Settings(devices="cpu,cpu"), tmp_path)


def end_with(fleet: FleetSupervisor, code: int, *, was_told: bool, was_ready: bool = False) -> int:
    """The exit code of the fleet after its first process has ended with a code."""
    process = fleet._owners[0]

    async def run() -> int:
        if was_told:
            fleet._drain_owners_or_stop_all()
        if was_ready:
            process.ready_event.set()
        return code

    process.run_process = run
    asyncio.run(asyncio.wait_for(fleet._keep_running(process), 10))
    assert fleet._stop_event.is_set()
    return fleet._exit_code


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, 0), (-signal.SIGTERM, 0), (-signal.SIGKILL, 1), (-signal.SIGABRT, 1), (1, 1), (2, 2), (3, 1)],
)
def test_a_process_that_starts_when_all_are_told_to_stop_may_have_no_handler(fleet, code, expected):
    assert end_with(fleet, code, was_told=True) == expected


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (-signal.SIGTERM, 1), (-signal.SIGSEGV, 1)])
def test_a_process_that_cannot_start_ends_all_with_its_code(fleet, code, expected, caplog):
    assert end_with(fleet, code, was_told=False) == expected
    assert [record.getMessage() for record in caplog.records] == ["process 0 cannot start: the server ends"]


def test_without_a_folder_for_sockets_the_server_is_misconfigured(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert serve_fleet(Settings(devices="cpu", port=0)) == ExitCode.MISCONFIGURED
    assert "TMPDIR" in caplog.records[-1].getMessage()


def test_one_that_was_ready_and_can_start_no_more_ends_all_if_no_other_serves(fleet):
    assert end_with(fleet, 2, was_told=False, was_ready=True) == 2


@pytest.mark.parametrize("later", [0, 1, -signal.SIGTERM])
def test_the_first_that_failed_decides(fleet, later):
    async def end_later() -> int:
        await fleet._stop_event.wait()
        return later

    async def run() -> None:
        fleet._owners[0].run_process, fleet._owners[1].run_process = fail, end_later
        await asyncio.wait_for(asyncio.gather(*map(fleet._keep_running, fleet._owners)), 10)

    async def fail() -> int:
        return 2

    asyncio.run(run())
    assert fleet._exit_code == 2


def test_restarts_are_reported_to_an_owner_once_one_runs(tmp_path):
    fleet = FleetSupervisor(Settings(devices="cpu", frontends="2", grpc_port=1), tmp_path)
    assert list_children(fleet._settings) == ["front end 0", "front end 1", "gateway"]
    (owner,) = fleet._owners
    sent: list[int] = []
    fleet._report_restart("front end 1")
    owner.send_message = lambda number, along=None: sent.append(number) is None
    fleet._link_process(owner)
    fleet._report_restart("gateway")
    assert sent == [RESTARTED + 1, RESTARTED + 2]


def test_each_restart_of_a_front_end_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.0)
    fleet = FleetSupervisor(Settings(frontends="1"), tmp_path)
    (front_end,), (owner,) = fleet._front_ends, fleet._owners
    front_end.ready_event.set()
    sent: list[int] = []
    owner.send_message = lambda number, along=None: sent.append(number) is None

    async def run() -> int:
        if len(sent) == 2:
            fleet._drain_owners_or_stop_all()
        return -signal.SIGKILL

    front_end.run_process = run
    asyncio.run(asyncio.wait_for(fleet._keep_running(front_end), 10))
    assert sent == [RESTARTED, RESTARTED]


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


@pytest.mark.parametrize(("steady_s", "pauses"), [(60.0, [0.08, 0.16]), (0.0, [0.04, 0.04])])
def test_a_process_that_ends_soon_is_started_after_longer_and_longer_pauses(
    fleet, monkeypatch, caplog, steady_s, pauses
):
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.04)
    monkeypatch.setattr(supervisor, "_STEADY_S", steady_s)
    process, starts = fleet._owners[0], []

    async def run() -> int:
        starts.append(time.monotonic())
        process.ready_event.set()
        if len(starts) == 3:
            fleet._drain_owners_or_stop_all()
        return 9

    process.run_process = run
    asyncio.run(asyncio.wait_for(fleet._keep_running(process), 10))
    assert all(after - before >= pause for (before, after), pause in zip(pairwise(starts), pauses, strict=True))
    assert process.restarts == 2
    assert [record.fields["exit_code"] for record in caplog.records] == [9, 9]
    assert all("is started again in" in record.getMessage() for record in caplog.records)


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


def served_by(family: int, address) -> bytes:
    """What a connection is sent, to its end."""
    with socket.socket(family) as client:
        client.settimeout(10)
        client.connect(address)
        return b"".join(iter(lambda: client.recv(1000), b""))


@pytest.fixture
def listeners(monkeypatch):
    """Those of a fleet, once all of its processes have been ready."""
    told = []
    url_of = supervisor.make_url
    monkeypatch.setattr(
        supervisor, "make_url", lambda listener, **more: (told.append(listener), url_of(listener, **more))[1]
    )
    return told


async def address_of(listeners):
    while not listeners:
        await asyncio.sleep(0.005)
    return listeners[0].getsockname()


def test_connections_are_spread_evenly_and_no_copy_of_one_is_kept(processes, listeners):
    async def play() -> None:
        address = await address_of(listeners)
        by = [await asyncio.to_thread(served_by, socket.AF_INET, address) for _ in range(4)]
        assert sorted(map(by.count, by)) == [2, 2, 2, 2]

    assert processes.run(settings_for(2), play) == 0


def test_a_connection_waits_for_a_process_and_one_that_is_not_ready_is_better_than_none(processes, listeners):
    # The first process ends once it was ready; the second one says no more than that it is there.
    processes.let(
        "owner", "if count('ready'): SIGN = NOT_READY\nelse: note('ready'); beat(0.05); note('ends'); sys.exit(9)"
    )

    async def play() -> None:
        address = await address_of(listeners)
        await processes.until("owner ends")
        assert await asyncio.to_thread(served_by, socket.AF_INET, address)
        assert processes.journal.count("owner ready") == 2

    assert processes.run(settings_for(1), play) == 0


def test_who_serves_tls_reads_its_files_again(processes, tmp_path):
    files = {f"tls_{name}": tmp_path / name for name in ("cert", "key")}
    for path in files.values():
        path.touch()

    async def play() -> None:
        for role in ("owner", "front_end"):
            await processes.until(f"{role} ready")
        os.kill(os.getpid(), signal.SIGHUP)
        await processes.until("front_end reloads")
        assert "owner reloads" not in processes.journal

    assert processes.run(settings_for(1, frontends="1", **files), play) == 0


def test_local_clients_are_the_owners_and_those_beyond_the_limit_are_counted_there(processes, tmp_path):
    processes.let(
        "owner",
        "def take(number, connection): number == LINK or (send(number), kept.append(connection))\nkept = []",
    )
    path = str(tmp_path / "local")

    async def play() -> None:
        for role in ("owner", "front_end"):
            await processes.until(f"{role} ready")
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            refused = await asyncio.to_thread(served_by, socket.AF_UNIX, path)
            assert b"local_connections" in refused
            await processes.until(f"owner heard {2**64 - REFUSED['local_connections']}")
            assert not [line for line in processes.journal if line.startswith("front_end heard")]

    assert processes.run(settings_for(1, frontends="1", local=path, local_connections=1), play) == 0


def test_a_connection_that_a_front_end_refuses_is_counted_by_an_owner(processes):
    processes.let("front_end", f"send({REFUSED['max_connections']})")

    async def play() -> None:
        await processes.until("front_end ready")
        await processes.until(f"owner heard {2**64 - REFUSED['max_connections']}")

    assert processes.run(settings_for(1, frontends="1"), play) == 0
