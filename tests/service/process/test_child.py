"""When a process of a fleet counts as ready, quiet or hung."""

import logging

import pytest
from normserve.process.child import OWNER, Process, ending
from normserve.process.handover import BEAT_S, MESSAGE, NOT_READY, READY, Heard


class Running:
    """A process that was started."""

    returncode = None
    pid = 4711

    def __init__(self) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


class Channel:
    """Says what a test has it say."""

    def __init__(self) -> None:
        self.said = b""

    def recv(self, count: int) -> bytes:
        return self.said


@pytest.fixture
def running():
    return Running()


@pytest.fixture
def process(running):
    process = Process("process 0", OWNER, lambda restarts: restarts, "cpu", hang_s=10)
    process._channel, process._running = Channel(), running
    return process


def say(process: Process, *numbers: int) -> None:
    process._channel.said = b"".join(map(MESSAGE.pack, numbers))
    process._hear(process._channel, Heard())


def wait(process: Process, seconds: float) -> None:
    for _ in range(round(seconds / BEAT_S)):
        process.note_silence(BEAT_S)


def test_what_it_said_last_is_what_it_is(process):
    assert process.is_there
    assert not process.is_ready
    say(process, NOT_READY, READY)
    assert process.is_ready
    say(process, READY, NOT_READY)
    assert not process.is_ready
    assert process.is_there


def test_one_that_starts_may_be_silent(process, running):
    wait(process, 1000)
    assert process.is_there
    say(process, NOT_READY)
    wait(process, 1000)
    assert running.kills == 0


def test_one_that_is_silent_gets_no_connections_until_it_speaks(process, running, caplog):
    caplog.set_level(logging.INFO, "normserve")
    say(process, READY)
    wait(process, 2.5)
    assert process.is_ready
    wait(process, 1)
    assert not process.is_ready
    assert not process.is_there
    say(process, READY)
    assert process.is_ready
    assert running.kills == 0
    assert [each.message for each in caplog.records] == [
        "process 0 gives no sign and gets no new connections",
        "process 0 gives signs again",
    ]
    assert [each.fields for each in caplog.records] == [{"child": "process 0", "device": "cpu", "pid": 4711}] * 2


def test_one_that_hangs_is_killed_once(process, running):
    say(process, READY)
    wait(process, 9.5)
    assert running.kills == 0
    wait(process, 20)
    assert running.kills == 1


def test_one_that_drains_and_hangs_is_killed_too(process, running):
    say(process, READY)
    say(process, NOT_READY)
    wait(process, 10)
    assert running.kills == 1


def test_one_that_has_ended_is_not_killed(process, running):
    say(process, READY)
    running.returncode = 0
    wait(process, 20)
    assert running.kills == 0


@pytest.mark.parametrize(
    ("code", "told"),
    [(0, {"exit_code": 0}), (3, {"exit_code": 3}), (-9, {"signal": "SIGKILL"}), (-11, {"signal": "SIGSEGV"})],
)
def test_an_end_is_a_code_or_a_signal_by_its_name(code, told):
    assert ending(code) == told


def test_a_signal_without_a_name_is_its_number():
    assert ending(-45) == {"signal": "45"}
