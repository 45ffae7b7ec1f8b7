"""Processes of a fleet that need nothing but Python: what they do is written in a journal."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from normserve.process import connection_limits, supervisor
from normserve.process.supervisor import FleetSupervisor
from normserve.settings import Settings

_PROGRAM = """
import os, select, signal, socket, struct, sys, time

READY, NOT_READY, LINK = 2**64 - 1, 2**64 - 2, 2**64 - 6
SIGN = READY
sys.stdin.buffer.read()
channel = socket.socket(fileno=int(sys.argv[1]))


def note(what):
    with open({journal!r}, "a") as journal:
        journal.write({role!r} + " " + what + "\\n")


def send(number):
    channel.send(struct.pack("<Q", number))


def count(what):
    with open({journal!r}) as journal:
        return journal.read().split("\\n").count({role!r} + " " + what)


def beat(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        send(SIGN)
        if select.select([channel], [], [], 0.02)[0]:
            said, descriptors, _, _ = socket.recv_fds(channel, 8, 1)
            if not said:
                sys.exit(7)
            (number,) = struct.unpack("<Q", said)
            if not descriptors:
                note("heard " + str(2**64 - number))
            for descriptor in descriptors:
                take(number, socket.socket(fileno=descriptor))


def take(number, connection):
    if number == LINK:
        note("linked")
        return
    send(number)
    with connection:
        connection.send(str(os.getpid()).encode())
    send(number)


def told(*_):
    note("told")
    at_signal()


signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGHUP, lambda *_: note("reloads"))


def at_signal():
    sys.exit(0)


{body}

note("ready")
beat(60)
"""


class FakeProcesses:
    """A fleet whose processes run what a test says.

    Attributes:
        fleet: set by `start`.
    """

    def __init__(self, folder: Path, monkeypatch) -> None:
        self._folder = folder
        self._journal = folder / "journal"
        self._journal.touch()
        self.fleet: FleetSupervisor
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setattr(supervisor, "OWNER", "fake_owner")
        monkeypatch.setattr(supervisor, "FRONT_END", "fake_front_end")
        monkeypatch.setattr(supervisor, "BEAT_S", 0.05)
        monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(connection_limits, "_LINGER_S", 0.0)
        for role in ("owner", "front_end"):
            self.let(role, "")

    def let(self, role: str, body: str) -> None:
        """Have an "owner" or a "front_end" run a piece of program once it can be told to stop."""
        text = _PROGRAM.format(journal=str(self._journal), role=role, body=body)
        (self._folder / f"fake_{role}.py").write_text(text)

    @property
    def journal(self) -> list[str]:
        """What the processes have noted."""
        return self._journal.read_text().splitlines()

    async def until(self, line: str, count: int = 1) -> None:
        """Wait for a line of the journal."""
        while self.journal.count(line) < count:
            await asyncio.sleep(0.005)

    def run(self, settings: Settings, play) -> int:
        """Run a fleet, and `play()` beside it, after which all is told to stop; the fleet's exit code."""

        async def run() -> int:
            self.fleet = FleetSupervisor(settings, self._folder)
            serving = asyncio.create_task(self.fleet.run())
            try:
                await play()
            finally:
                # Once it has ended nothing minds the signal, which would end the tests.
                if not serving.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(serving), 10)
            return await serving

        return asyncio.run(asyncio.wait_for(run(), 30))
