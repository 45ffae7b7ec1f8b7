"""`--devices` and `--frontends`: several processes behind one port.

This process owns the listening sockets and no device.  It accepts connections and hands each to the next process
that is ready, so that connections are spread evenly, none is lost with a process that dies before it had any, and
one that starts gets none until it can serve.  What a connection says is between its client and that process: one
that owns a device or, where there are front ends, one of those, each of which is linked to every owner.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from normserve.peers.siblings import Place
from normserve.process.announcement import announce
from normserve.process.connections import ConnectionLimits, connections_for_descriptors
from normserve.process.handover import BEAT_S, LINK, NOT_READY, READY, REFUSED, Heard, hand_over
from normserve.process.listeners import listening, listening_locally, url_of
from normserve.process.local_clients import local_limits
from normserve.settings import Settings, environment_of

log = logging.getLogger(__name__)

OWNER, FRONT_END = "normserve.process.worker", "normserve.process.front_end"

# Who has given no sign for so long gets no new connections.
_QUIET_S = 3.0
# Descriptors may be free again by then.
_LINK_AGAIN_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
# One that ran so long did not fail at its start.
_STEADY_S = 60.0


class Process:
    """One place of the fleet, and the process that is in it now."""

    def __init__(self, name: str, command: str, say: Callable[[int], object], device: str, hang_s: float) -> None:
        """Args:
        name: what the log calls it.
        command: the module that it runs, which is given its channel.
        say: what it is told, given how often one in this place has ended before it was to.
        device: as `--devices` names it, what it sees.
        hang_s: one that gives no sign for so long is killed.
        """
        self.name = name
        self._command, self._say, self._device, self._hang_s = command, say, device, hang_s
        # Of the connections that the process has, by their numbers, who is told of their end.
        self._held: dict[int, Callable[[], None]] = {}
        self._channel: socket.socket | None = None
        self._running: asyncio.subprocess.Process | None = None
        # Before it has said anything, a SIGHUP would end it.
        self._minds_signals = self._reloads_late = False
        self.restarts = 0
        self.was_ready = asyncio.Event()
        self.on_start: Callable[[], None] = lambda: None
        self._says_ready = False
        # Whether this one, of all that have been in this place, has been ready.
        self._has_served = False
        self._silence_s = 0.0

    @property
    def is_there(self) -> bool:
        """It can be handed connections, be it that it answers that it is not ready."""
        return self._channel is not None and self._silence_s < _QUIET_S

    @property
    def is_ready(self) -> bool:
        """It takes work."""
        return self._says_ready and self.is_there

    async def run(self) -> int:
        """Start the process and wait for its end; its exit code."""
        here, there = socket.socketpair()
        here.setblocking(False)
        with there:
            self._running = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._command, str(there.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[there.fileno()],
                env=environment_of(self._device),
                # A terminal's interrupt is for this process, which tells the others.
                start_new_session=True,
            )
        self._channel, self._has_served, self._silence_s = here, False, 0.0
        loop = asyncio.get_running_loop()
        loop.add_reader(here, self._hear, here, Heard())
        assert self._running.stdin is not None
        self._running.stdin.write(pickle.dumps(self._say(self.restarts)))
        self._running.stdin.close()
        self.on_start()
        try:
            return await self._running.wait()
        finally:
            loop.remove_reader(here)
            here.close()
            self._channel, self._says_ready, self._minds_signals = None, False, False
            for on_end in self._held.values():
                on_end()
            self._held.clear()

    def take(self, connection: socket.socket, number: int, on_end: Callable[[], None]) -> bool:
        """Give it a connection; whether it took it.

        Args: on_end: told when the connection has ended.
        """
        if self._channel is None or not hand_over(self._channel, number, connection):
            return False
        self._held[number] = on_end
        return True

    def tell(self, number: int, along: socket.socket | None = None) -> bool:
        """Give it a message, and a socket with it; whether it took it."""
        return self._channel is not None and hand_over(self._channel, number, along)

    def signal(self) -> None:
        """Have it drain, or stop at once if it does."""
        if self._running is not None and self._running.returncode is None:
            self._running.send_signal(signal.SIGTERM)

    def reload(self) -> None:
        """Have it read the TLS files again, as soon as it minds the signal that says so."""
        if self._minds_signals and self._running is not None and self._running.returncode is None:
            self._running.send_signal(signal.SIGHUP)
        else:
            self._reloads_late = True

    def note_silence(self, seconds: float) -> None:
        """So much time has passed; a process that has been ready and gives no sign for long is killed."""
        # One that starts loads libraries, and says nothing for long.
        if not self._has_served or self._running is None or self._running.returncode is not None:
            return
        before, self._silence_s = self._silence_s, self._silence_s + seconds
        if before < _QUIET_S <= self._silence_s:
            log.warning("%s gives no sign and gets no new connections", self.name)
        if before < self._hang_s <= self._silence_s:
            log.error("%s has given no sign for %.1f s and is killed", self.name, self._silence_s)
            self._running.kill()

    def _hear(self, channel: socket.socket, heard: Heard) -> None:
        try:
            said = channel.recv(4096)
        except OSError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(channel)
            self._says_ready = False
            return
        self._minds_signals = True
        if self._reloads_late:
            self._reloads_late = False
            self.reload()
        if self._silence_s >= _QUIET_S:
            log.info("%s gives signs again", self.name)
        self._silence_s = 0.0
        for number in heard.feed(said):
            if (on_end := self._held.pop(number, None)) is not None:
                on_end()
            elif number in (READY, NOT_READY):
                self._says_ready = number == READY
            elif number == LINK:
                asyncio.get_running_loop().call_later(_LINK_AGAIN_S, self.on_start)
        if self._says_ready:
            self._has_served = True
            self.was_ready.set()


class Fleet:
    """Every process, and the sockets that they serve."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._limits = ConnectionLimits(
            max_all=connections_for_descriptors(settings.max_connections),
            max_per_address=settings.max_connections_per_address,
            on_refused=self._count_refused,
        )
        self._local_limits = local_limits(settings, self._count_refused)
        self._owners = _owners(settings, folder)
        self._front_ends = _front_ends(settings)
        self._processes = [*self._owners, *self._front_ends]
        for process in self._processes:
            process.on_start = functools.partial(self._link, process)
        self._numbers = itertools.count()
        self._turns = itertools.count()
        self._ending = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Serve until told to stop; the exit code."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            listeners = stack.enter_context(listening(self._settings))
            takers = self._front_ends or self._owners
            accepted = [self._limits.accept(each, self._hand_over_from(self._limits, takers)) for each in listeners]
            if self._settings.local is not None:
                listener = stack.enter_context(listening_locally(self._settings))
                hand_over = self._hand_over_from(self._local_limits, self._owners)
                accepted.append(self._local_limits.accept(listener, hand_over))
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._end)
            if self._settings.tls_cert is not None:
                loop.add_signal_handler(signal.SIGHUP, self._reload)
            beside = [asyncio.create_task(work) for work in (self._announce(listeners[0]), self._watch())]
            accepting = [asyncio.create_task(each) for each in accepted]
            serving = [asyncio.create_task(self._keep(process)) for process in self._front_ends]
            await asyncio.gather(*(self._keep(process) for process in self._owners))
            # What the owners had admitted has been answered by way of these.
            for process in self._front_ends:
                process.signal()
            await asyncio.gather(*serving)
            for task in (*beside, *accepting):
                task.cancel()
        return self._exit_code

    async def _keep(self, process: Process) -> None:
        """Run a process again when it ends before it is to."""
        pause = _FIRST_PAUSE_S
        while not self._ending.is_set():
            began = time.monotonic()
            code = await process.run()
            if self._ending.is_set() or not process.was_ready.is_set():
                # What cannot even start will not the next time; the others are not kept for it.
                self._exit_code = self._exit_code or int(code != 0)
                if not self._ending.is_set():
                    log.critical("%s ended with %d before it was ready", process.name, code)
                    self._end()
                return
            process.restarts += 1
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _STEADY_S else min(2 * pause, _LONGEST_PAUSE_S)
            log.error("%s ended with %d and is started again in %.1f s", process.name, code, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)

    async def _watch(self) -> None:
        """Count the time in which processes give no sign.

        Never more at once than what was slept for: a while in which this process itself was stopped, or the whole
        machine, is nobody's silence.
        """
        while True:
            await asyncio.sleep(BEAT_S)
            for process in self._processes:
                process.note_silence(BEAT_S)

    def _end(self) -> None:
        # At the second signal nobody is waited for.
        processes = self._processes if self._ending.is_set() else self._owners
        self._ending.set()
        for process in processes:
            process.signal()

    def _link(self, process: Process) -> None:
        """Connect one that has started with those of the other kind that are there."""
        if process in self._front_ends:
            pairs = [(process, owner) for owner in self._owners]
        else:
            pairs = [(front_end, process) for front_end in self._front_ends]
        for front_end, owner in pairs:
            if front_end.is_there and owner.is_there:
                here, there = socket.socketpair()
                with here, there:
                    front_end.tell(LINK, here)
                    owner.tell(LINK, there)

    def _reload(self) -> None:
        for process in self._front_ends or self._owners:
            process.reload()

    def _hand_over_from(
        self, limits: ConnectionLimits, takers: Sequence[Process]
    ) -> Callable[[socket.socket, str], Coroutine[None, None, None]]:
        """What takes the connections that these limits admit."""

        async def hand_over(connection: socket.socket, address: str) -> None:
            await self._hand_over(connection, takers, functools.partial(limits.release, address))

        return hand_over

    async def _hand_over(
        self, connection: socket.socket, takers: Sequence[Process], on_end: Callable[[], None]
    ) -> None:
        """To the next that is ready, else to one that says that it is not, else as soon as there is one."""
        number = next(self._numbers)
        with connection:
            while True:
                first = next(self._turns) % len(takers)
                in_turn = [*takers[first:], *takers[:first]]
                willing = [each for each in in_turn if each.is_ready] or [each for each in in_turn if each.is_there]
                if any(process.take(connection, number, on_end) for process in willing):
                    return
                await asyncio.sleep(0.05)

    def _count_refused(self, reason: str) -> None:
        any(process.tell(REFUSED[reason]) for process in self._owners)

    async def _announce(self, listener: socket.socket) -> None:
        for process in self._processes:
            await process.was_ready.wait()
        url = url_of(listener, encrypted=self._settings.tls_cert is not None)
        with_device = f"{len(self._owners)} with a device" if self._front_ends else f"on {self._settings.devices}"
        log.info("%d processes %s are ready on %s", len(self._processes), with_device, url)
        announce(self._settings, url)


def _owners(settings: Settings, folder: Path) -> list[Process]:
    """A place for each device."""
    # Without a choice of devices there is one process, which sees all and takes what a single one would.
    devices = settings.devices.split(",") if settings.devices else [""]

    def said(index: int, restarts: int) -> object:
        place = Place(index, len(devices), devices[index], restarts, folder, is_shown=bool(settings.devices))
        return _settings_of(settings, devices[index], len(devices)), place

    return [
        Process(f"process {index}", OWNER, functools.partial(said, index), devices[index], settings.hang_s)
        for index in range(len(devices))
    ]


def _front_ends(settings: Settings) -> list[Process]:
    """A place for each process that speaks HTTP in the others' stead."""
    return [
        Process(f"front end {index}", FRONT_END, functools.partial(_told, settings, index), "cpu", settings.hang_s)
        for index in range(settings.frontend_count)
    ]


def _told(settings: Settings, index: int, restarts: int) -> object:
    return settings, index


def _settings_of(settings: Settings, device: str, count: int) -> Settings:
    """What one process with a device is told."""
    threads = settings.cpu_threads or max(1, len(os.sched_getaffinity(0)) // count)
    own: dict[str, Any] = {"uds": None, "devices": ""}
    if device:
        own |= {"backend": "torch" if device == "cpu" else "triton", "cpu_threads": threads}
    return settings.model_copy(update=own)


def serve_fleet(settings: Settings) -> int:
    """Run what `settings.devices` and `settings.frontends` ask for until told to stop; the exit code."""
    with tempfile.TemporaryDirectory(prefix="normserve-") as folder:

        async def run() -> int:
            return await Fleet(settings, Path(folder)).run()

        return asyncio.run(run())
