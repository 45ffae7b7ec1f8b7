"""The gateway's process: it listens, serves calls, and drains before it ends."""

import asyncio
import contextlib
import logging
import re
import signal
from pathlib import Path

import grpc
import uvloop
from grpc import aio

from normserve.codec.forwarded_for import TrustedProxies
from normserve.grpc.admission_check import AdmissionCheck
from normserve.grpc.calls import CallRunner, StreamDrain
from normserve.grpc.gateway_settings import GatewaySettings
from normserve.grpc.health_service import HealthService
from normserve.grpc.inference_service import InferenceService
from normserve.grpc.message_budget import MessageBudget
from normserve.grpc.reflection_service import ReflectionService
from normserve.grpc.server_client import ServerClient
from normserve.hangups import handle_hangups
from normserve.logs.formatting import ThrottledLogger
from normserve.regular_files import open_regular_file

log = logging.getLogger(__name__)

_MAX_CALLS = 1024
_MAX_CALLS_PER_CONNECTION = 256
_MAX_METADATA_BYTES = 16 * 1024
# Of probes, and of reflection, neither of which needs a key: messages that are received at once, and calls that
# wait to send theirs.
_MAX_KEY_FREE_MESSAGES, _MAX_KEY_FREE_WAITING = 2, 64


class GatewayError(Exception):
    """The gateway cannot start; the message names the option."""


def run_gateway(settings: GatewaySettings, parent: int | None = None) -> None:
    """Run a gateway until a signal stops it.

    Args: parent: the descriptor of a pipe, at whose end the gateway stops, too; None for no pipe.

    Raises:
        GatewayError: it cannot start with these settings.
    """
    uvloop.run(_serve_through_hangups(settings, parent))


async def _serve_through_hangups(settings: GatewaySettings, parent: int | None) -> None:
    """Serve like `_serve`; SIGHUP is logged, and otherwise ignored."""
    with handle_hangups(_log_ignored_reload):
        await _serve(settings, parent)


async def _serve(settings: GatewaySettings, parent: int | None) -> None:
    """Serve until SIGTERM or SIGINT, and for `drain_delay_s` after it.  Then refuse new calls and finish those in
    progress.  A second signal ends all calls.
    """
    try:
        server_client = ServerClient(settings.server)
    except ValueError as error:
        raise GatewayError(f"--server: {error}") from None
    health, stream_drain = HealthService(server_client), StreamDrain()
    max_bytes = settings.grpc_max_message_bytes
    budget = MessageBudget(settings.max_inflight_bytes, max_bytes, _MAX_CALLS)
    probe_budget, reflection_budget = (
        MessageBudget(_MAX_KEY_FREE_MESSAGES * max_bytes, max_bytes, _MAX_KEY_FREE_WAITING) for _ in range(2)
    )
    calls = CallRunner(
        AdmissionCheck(server_client),
        budget,
        probe_budget,
        stream_drain,
        settings.body_timeout_s,
        settings.send_timeout_s,
        ThrottledLogger(log),
        TrustedProxies.parse(settings.trusted_proxies),
    )
    server = aio.server(options=_make_options(settings), maximum_concurrent_rpcs=_MAX_CALLS)
    inference, reflection = InferenceService(server_client), ReflectionService(reflection_budget)
    server.add_generic_rpc_handlers(
        (inference.make_handlers(calls), health.make_handlers(calls), *reflection.make_handlers(calls))
    )
    port = _add_port(server, settings)
    await server.start()
    stop, parent_end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        loop.add_reader(parent, _on_parent_end, parent, stop, parent_end)
    # Whoever reads this may send a signal at once.
    host = settings.listen.rpartition(":")[0]
    log.info("gRPC is ready on %s:%d, for the server at %s", host, port, server_client.display_name)
    await stop.wait()
    stop.clear()
    health.is_ending = True
    await _wait_for_retirement(settings.drain_delay_s, stop, parent_end)
    log.info("draining: calls in progress are finished, new ones are refused")
    stream_drain.begin()
    draining = asyncio.ensure_future(server.stop(settings.drain_s))
    second = asyncio.ensure_future(stop.wait())
    await asyncio.wait((draining, second), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await server.stop(None)
    second.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await draining
    server_client.close()


def _log_ignored_reload() -> None:
    """Log that SIGHUP is ignored: TLS files, if there are any, are read at each handshake."""
    log.info("SIGHUP came and is ignored: TLS files are read again at each handshake")


async def _wait_for_retirement(delay_s: float, stop: asyncio.Event, parent_end: asyncio.Event) -> None:
    """Wait while load balancers learn of the end, but no longer than to a second signal or the parent's end.

    Afterwards `stop` is set only if there was a second signal.
    """
    if delay_s and not parent_end.is_set():
        log.info("retiring: not serving from now on, calls are accepted for another %g s", delay_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), delay_s)
    if parent_end.is_set():
        stop.clear()


def _on_parent_end(parent: int, stop: asyncio.Event, parent_end: asyncio.Event) -> None:
    """Stop the gateway: the process that has started it has ended."""
    asyncio.get_running_loop().remove_reader(parent)
    parent_end.set()
    stop.set()


def _make_options(settings: GatewaySettings) -> list[tuple[str, int]]:
    """Make the options of gRPC: limits of messages, connections and pings."""
    return [
        ("grpc.max_receive_message_length", settings.grpc_max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", _MAX_CALLS_PER_CONNECTION),
        # For a call whose message has no room yet, gRPC would otherwise receive more than 64 KiB: as much as the
        # network holds.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_connection_idle_ms", _convert_to_ms(settings.keep_alive_s)),
        ("grpc.server_handshake_timeout_ms", _convert_to_ms(settings.header_timeout_s)),
        # Two gateways on one port would each get some of the connections.
        ("grpc.so_reuseport", 0),
        # A peer that does not answer a ping in time is gone; one that pings more often than this is sent away.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 3),
    ]


def _convert_to_ms(seconds: float) -> int:
    """Return a time in milliseconds, as long as gRPC's numbers go."""
    return round(min(seconds * 1000, 2**31 - 1))


def _add_port(server: aio.Server, settings: GatewaySettings) -> int:
    """Listen on the address, with TLS if there is a certificate; return the port.

    Raises:
        GatewayError: the address is not HOST:PORT or cannot be bound, or a file cannot be used.
    """
    host, _, digits = settings.listen.rpartition(":")
    # gRPC would listen on the port's remainder by 65536.
    if not host or not re.fullmatch("[0-9]{1,5}", digits) or int(digits) >= 2**16:
        raise GatewayError(f"--listen {settings.listen}: must be HOST:PORT with a PORT from 0 to 65535")
    try:
        if settings.tls_cert is None:
            port: int = server.add_insecure_port(settings.listen)
        else:
            port = server.add_secure_port(settings.listen, _CertificateSource(settings).make_credentials())
        return port
    except RuntimeError:
        raise GatewayError(f"--listen {settings.listen}: this address cannot be listened on") from None


class _CertificateSource:
    """The certificate files, which are read again for each handshake, so that renewed ones are used."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._contents = self._read()

    def make_credentials(self) -> grpc.ServerCredentials:
        """Make the credentials of the port; clients need a certificate if there are authorities for them."""
        needs_certificate = self._settings.tls_client_ca is not None
        return grpc.dynamic_ssl_server_credentials(
            self._make_configuration(), self._find_new_configuration, needs_certificate
        )

    def _find_new_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration if a file has changed, else None; files that cannot be read do not count."""
        try:
            contents = self._read()
        except GatewayError:
            return None
        if contents == self._contents:
            return None
        self._contents = contents
        return self._make_configuration()

    def _make_configuration(self) -> grpc.ServerCertificateConfiguration:
        chain, key, authorities = self._contents
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        """Read the certificate and its chain, the key, and the authorities for clients.

        Raises:
            GatewayError: a file cannot be read.
        """
        settings = self._settings
        assert settings.tls_cert is not None
        chain = _read_file("tls-cert", settings.tls_cert)
        key = chain if settings.tls_key is None else _read_file("tls-key", settings.tls_key)
        ca = settings.tls_client_ca
        return chain, key, None if ca is None else _read_file("tls-client-ca", ca)


def _read_file(option: str, path: Path) -> bytes:
    try:
        with open_regular_file(path) as file:
            return file.read()
    except OSError as error:
        raise GatewayError(f"--{option}: {path} cannot be read: {error.strerror}") from None
