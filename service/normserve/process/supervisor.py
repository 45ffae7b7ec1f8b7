"""`--devices` and `--frontends`: several processes behind one port.

This process owns the listening sockets and no device.  It accepts connections and passes each to the next process
that is ready.  Connections are therefore spread evenly, a process that starts receives none before it is ready,
and if a process ends before it has received a connection, another process receives it.  Data of a connection is
exchanged only between its client and that process: one that owns a device or, with front ends, a front end that is
linked to all owners.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from normserve.codec.forwarded_for import TrustedProxies
from normserve.hangups import handle_hangups
from normserve.peers.sibling_processes import FleetPosition
from normserve.process.child import FRONT_END, OWNER, ChildSlot, HandedConnection, make_owner_name
from normserve.process.connection_limits import (
    AcceptedConnection,
    ConnectionLimits,
    raise_descriptor_limit_for_connections,
)
from normserve.process.exit_codes import ExitCode, describe_exit
from normserve.process.gateway_process import GATEWAY, GatewayProcess, end_gateway, make_gateway_process
from normserve.process.listeners import (
    ListenError,
    make_socket_folder,
    make_url,
    open_listeners,
    open_local_listener,
    print_url_and_example,
)
from normserve.process.local_setup import make_local_limits
from normserve.process.supervisor_channel import BEAT_S, LINK, REFUSED, RESTARTED
from normserve.process.tls import log_ignored_reload
from normserve.settings import Settings

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
# A process that ran for this long did not fail at its start.
_STEADY_S = 60.0


class FleetSupervisor:
    """The parent process of a server with several processes: it owns the listening sockets, passes
    connections to child processes, and restarts children that end.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._connection_limits = ConnectionLimits(
            max_all=raise_descriptor_limit_for_connections(settings.max_connections),
            max_per_address=settings.max_connections_per_address,
            on_refused=self._report_refused,
            proxies=TrustedProxies.parse(settings.trusted_proxies),
        )
        self._local_limits = make_local_limits(settings, self._report_refused)
        self._owners = _make_owner_slots(settings, folder)
        self._front_ends = _make_front_end_slots(settings)
        self._processes = [*self._owners, *self._front_ends]
        for process in self._processes:
            process.on_start = functools.partial(self._link_process, process)
            process.on_refused = self._report_refused
        self._connection_numbers = itertools.count()
        self._turn_counter = itertools.count()
        # Connections that a process had not received when it ended.
        self._retry_tasks: set[asyncio.Task[None]] = set()
        self._gateway: GatewayProcess | None = None
        # Restarts that are counted once a process that owns a device runs.
        self._unsent_restarts: list[str] = []
        self._stop_event = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Listen, run all child processes and pass connections to them until a signal stops the server; return
        the exit code.
        """
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            listeners = stack.enter_context(open_listeners(self._settings))
            takers = self._front_ends or self._owners
            accepted = [
                self._connection_limits.accept_connections(
                    each, self._make_hand_over(self._connection_limits, takers)
                )
                for each in listeners
            ]
            if self._settings.local is not None:
                listener = stack.enter_context(open_local_listener(self._settings))
                hand_over = self._make_hand_over(self._local_limits, self._owners)
                accepted.append(self._local_limits.accept_connections(listener, hand_over))
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._drain_owners_or_stop_all)
            stack.enter_context(handle_hangups(self._reload_tls))
            beside = [
                asyncio.create_task(work)
                for work in (self._announce_when_all_ready(listeners[0]), self._monitor_silence())
            ]
            accepting = [asyncio.create_task(each) for each in accepted]
            self._gateway = make_gateway_process(self._settings, listeners)
            if self._gateway is not None:
                self._gateway.on_misconfigured = self._end_as_misconfigured
                self._gateway.on_restarted = functools.partial(self._report_restart, GATEWAY)
            speaking = None if self._gateway is None else asyncio.create_task(self._gateway.keep_running())
            serving = [asyncio.create_task(self._keep_running(process)) for process in self._front_ends]
            await asyncio.gather(*(self._keep_running(process) for process in self._owners))
            # The front ends have sent the responses to all requests that the owners had admitted.
            for process in self._front_ends:
                process.request_stop()
            await asyncio.gather(*serving)
            if self._gateway is not None and speaking is not None:
                await end_gateway(self._gateway, speaking)
            for task in (*beside, *accepting, *self._retry_tasks):
                task.cancel()
        return self._exit_code

    async def _keep_running(self, process: ChildSlot) -> None:
        """Run a process and restart it whenever it ends, after a pause that grows.  Return when the server stops or
        the process cannot start.
        """
        pause = _FIRST_PAUSE_S
        while not self._stop_event.is_set():
            began = time.monotonic()
            code = await process.run_process()
            if self._stop_event.is_set() or self._is_fatal_exit(process, code):
                if self._stop_event.is_set() and code == -signal.SIGTERM:
                    # It was starting and had no handler yet for the signal that it was sent.
                    code = ExitCode.STOPPED
                self._exit_code = self._exit_code or (code if code in list(ExitCode) else ExitCode.FAILED)
                if not self._stop_event.is_set():
                    ended = {**process.log_fields, **describe_exit(code)}
                    log.critical("%s cannot start: the server ends", process.name, extra={"fields": ended})
                    self._drain_owners_or_stop_all()
                return
            process.restarts += 1
            if process in self._front_ends:
                self._report_restart(process.name)
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _STEADY_S else min(2 * pause, _LONGEST_PAUSE_S)
            ended = {**process.log_fields, **describe_exit(code)}
            log.error("%s ended and is started again in %.1f s", process.name, pause, extra={"fields": ended})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_event.wait(), pause)

    def _is_fatal_exit(self, process: ChildSlot, code: int) -> bool:
        """Return whether the end of this process must end the server, because restarting it is pointless.

        That is so if no process in its slot has ever been ready, or if its settings are invalid and no process that
        owns a device is ready.  One that has been ready and can start no more, such as one whose device is gone, is
        tried again as long as another one serves.
        """
        if not process.ready_event.is_set():
            return True
        return code == ExitCode.MISCONFIGURED and not any(owner.is_ready for owner in self._owners)

    async def _monitor_silence(self) -> None:
        """Add half a second to each process's silence every half second, so that a process that hangs is noticed
        and killed.

        Each step adds at most the time slept: time in which this process or the whole machine was stopped does not
        count.
        """
        while True:
            await asyncio.sleep(BEAT_S)
            for process in self._processes:
                process.add_silence(BEAT_S)

    def _end_as_misconfigured(self) -> None:
        """End the server, because the gateway of gRPC cannot start with its settings."""
        self._exit_code = ExitCode.MISCONFIGURED
        self._drain_owners_or_stop_all()

    def _drain_owners_or_stop_all(self) -> None:
        """Handle a signal: the first one drains the processes that own devices, and front ends stop after them.
        The second one stops all at once.
        """
        # At the second signal the supervisor waits for no process.
        processes = self._processes if self._stop_event.is_set() else self._owners
        self._stop_event.set()
        if self._gateway is not None:
            self._gateway.request_stop()
        for process in processes:
            process.request_stop()

    def _link_process(self, process: ChildSlot) -> None:
        """Connect a process that has started with its running counterparts by socket pairs.  The counterparts of a
        front end are the processes that own devices, and the reverse.
        """
        if process in self._front_ends:
            pairs = [(process, owner) for owner in self._owners]
        else:
            pairs = [(front_end, process) for front_end in self._front_ends]
            unsent, self._unsent_restarts = self._unsent_restarts, []
            for child in unsent:
                self._report_restart(child)
        for front_end, owner in pairs:
            if front_end.is_reachable and owner.is_reachable:
                here, there = socket.socketpair()
                with here, there:
                    front_end.send_message(LINK, here)
                    owner.send_message(LINK, there)

    def _reload_tls(self) -> None:
        """Make the processes that serve HTTP read the TLS files again; without TLS, log that there are none."""
        if self._settings.tls_cert is None:
            log_ignored_reload()
            return
        for process in self._front_ends or self._owners:
            process.request_tls_reload()

    def _make_hand_over(
        self, limits: ConnectionLimits, takers: Sequence[ChildSlot]
    ) -> Callable[[socket.socket, AcceptedConnection], Coroutine[None, None, None]]:
        """Return a callback that passes each admitted connection to one of the processes `takers`.

        When the connection has ended, it is subtracted from the counts of `limits`.
        """

        async def hand_over(connection: socket.socket, admission: AcceptedConnection) -> None:
            on_end = functools.partial(limits.release_connection, admission.address)
            await self._hand_over_connection(connection, takers, on_end, admission.exceeded_limit)

        return hand_over

    async def _hand_over_connection(
        self,
        connection: socket.socket,
        takers: Sequence[ChildSlot],
        on_end: Callable[[], None],
        exceeded_limit: str | None = None,
    ) -> None:
        """Pass a connection to the next ready process in turn, or to one that runs but is not ready.

        If there is none, try again until there is one.  If a process ends before it has received the connection,
        the
        connection is passed to another.

        Args:
            takers: the processes that may serve it.
            on_end: called when the connection has ended.
            exceeded_limit: the limit that it exceeds, if any.
        """

        def hand_over_again(connection: socket.socket) -> None:
            retry_task = asyncio.create_task(self._hand_over_connection(connection, takers, on_end, exceeded_limit))
            self._retry_tasks.add(retry_task)
            retry_task.add_done_callback(self._retry_tasks.discard)

        number, handed = (
            next(self._connection_numbers),
            HandedConnection(connection, on_end, hand_over_again, exceeded_limit),
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            while True:
                first = next(self._turn_counter) % len(takers)
                in_turn = [*takers[first:], *takers[:first]]
                willing = [each for each in in_turn if each.is_ready] or [
                    each for each in in_turn if each.is_reachable
                ]
                if any(process.hand_over_connection(number, handed) for process in willing):
                    stack.pop_all()
                    return
                await asyncio.sleep(0.05)

    def _report_refused(self, reason: str) -> None:
        """Report a refused connection to the first reachable process that owns a device, which counts it in its
        metrics.
        """
        any(process.send_message(REFUSED[reason]) for process in self._owners)

    def _report_restart(self, child: str) -> None:
        """Report that a child without a device is started again, for the metrics of a process that owns one.

        While none runs, the report waits.  Processes with a device know their own restarts.
        """
        message = RESTARTED + list_children(self._settings).index(child)
        if not any(process.send_message(message) for process in self._owners):
            self._unsent_restarts.append(child)

    async def _announce_when_all_ready(self, listener: socket.socket) -> None:
        """Wait until every process has been ready once, then log and print the server's URL."""
        for process in self._processes:
            await process.ready_event.wait()
        url = make_url(listener, encrypted=self._settings.tls_cert is not None)
        with_device = f"({len(self._owners)} with a device)" if self._front_ends else f"on {self._settings.devices}"
        log.info("%d processes %s are ready on %s", len(self._processes), with_device, url)
        print_url_and_example(self._settings, url)


def list_children(settings: Settings) -> list[str]:
    """List the names of the supervisor's children without a device: front ends, and the gateway of gRPC."""
    front_ends = [_name_front_end(index) for index in range(settings.frontend_count)]
    return front_ends if settings.grpc_port is None else [*front_ends, GATEWAY]


def _name_front_end(index: int) -> str:
    return f"front end {index}"


def _make_owner_slots(settings: Settings, folder: Path) -> list[ChildSlot]:
    """Make a supervisor's slot for each device, in which a process that owns the device will run."""
    # Without `--devices` there is one process, which sees all devices and chooses as a single server does.
    devices = settings.devices.split(",") if settings.devices else [""]

    def make_arguments(index: int, restarts: int) -> object:
        place = FleetPosition(
            index,
            len(devices),
            devices[index],
            restarts,
            folder,
            is_visible_to_clients=bool(settings.devices),
            children=list_children(settings),
        )
        return _make_owner_settings(settings, devices[index], len(devices)), place

    return [
        ChildSlot(
            make_owner_name(index), OWNER, functools.partial(make_arguments, index), devices[index], settings.hang_s
        )
        for index in range(len(devices))
    ]


def _make_front_end_slots(settings: Settings) -> list[ChildSlot]:
    """Make a supervisor's slot for each front end process; none if the settings have no front ends."""
    return [
        ChildSlot(
            _name_front_end(index),
            FRONT_END,
            functools.partial(_make_front_end_arguments, settings, index),
            "cpu",
            settings.hang_s,
        )
        for index in range(settings.frontend_count)
    ]


def _make_front_end_arguments(settings: Settings, index: int, restarts: int) -> object:
    """Return the settings and the index, which the front end process reads from standard input."""
    return settings, index


def _make_owner_settings(settings: Settings, device: str, count: int) -> Settings:
    """Return the settings for one process that owns a device: its backend, and its share of the CPU threads.

    Args:
        device: a CUDA device's number or "cpu"; "" if the process may choose.
        count: the number of such processes.
    """
    threads = settings.cpu_threads or max(1, len(os.sched_getaffinity(0)) // count)
    own: dict[str, Any] = {"uds": None, "devices": "", "grpc_port": None}
    if device:
        own |= {"backend": "torch" if device == "cpu" else "triton", "cpu_threads": threads}
    return settings.model_copy(update=own)


def serve_fleet(settings: Settings) -> int:
    """Run a server of several processes, one for each device and front end, until a signal; return the exit
    code.
    """

    async def run(folder: Path) -> int:
        return await FleetSupervisor(settings, folder).run()

    try:
        with make_socket_folder() as folder:
            return asyncio.run(run(folder))
    except ListenError as error:
        log.critical("the server cannot listen: %s", error)
        return ExitCode.MISCONFIGURED
