"""The exit code of several processes, and which of their ends is the end of all."""

import asyncio
import signal

import pytest
from normserve.process.supervisor import Fleet
from normserve.settings import Settings


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
