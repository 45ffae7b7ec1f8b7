"""Sockets of the blocking httpx client that respect the call's deadline over all waits together.

httpx's timeouts begin anew at each read and each write, so a server that sends a byte now and then is waited for
without end.  Its connection pool opens sockets through a network backend, which is replaced here by one that asks
the request's deadline (`RemainingSeconds`) before each wait.
"""

import socket
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from normserve.client.deadlines import RemainingSeconds

_Options = Iterable[Any] | None


def enforce_deadlines(http: httpx.Client) -> None:
    """Make the sockets of an httpx client wait no longer than the deadlines of its requests.

    A transport that is not httpx's own is left as it is: it is given the time that is left when a request begins,
    for each of its waits.
    """
    for transport in (http._transport, *http._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if isinstance(pool, httpcore.ConnectionPool) and not isinstance(pool._network_backend, _DeadlineBackend):
            pool._network_backend = _DeadlineBackend(pool._network_backend)


def _get_remaining_s(timeout: float | None, error: type[httpcore.TimeoutException]) -> float | None:
    """Return the most seconds to wait; raise the error when none are left."""
    remaining_s = timeout.deadline.get_remaining_s() if isinstance(timeout, RemainingSeconds) else timeout
    if remaining_s is not None and remaining_s <= 0:
        raise error("the call's time is over")
    return remaining_s


class _DeadlineBackend(httpcore.NetworkBackend):
    """A network backend that opens sockets through another backend and enforces deadlines on them."""

    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._backend = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: _Options = None,
    ) -> httpcore.NetworkStream:
        """Try each address of a host with the remaining time, which the inner backend would grant to each anew."""
        failure: Exception | None = None
        for address in _resolve_addresses(host, port):
            remaining_s = _get_remaining_s(timeout, httpcore.ConnectTimeout)
            try:
                return _DeadlineStream(
                    self._backend.connect_tcp(address, port, remaining_s, local_address, socket_options)
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError("the host has no address")

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: _Options = None
    ) -> httpcore.NetworkStream:
        remaining_s = _get_remaining_s(timeout, httpcore.ConnectTimeout)
        return _DeadlineStream(self._backend.connect_unix_socket(path, remaining_s, socket_options))


def _resolve_addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A name of which no query can be made: a part of it is too long.
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(str(error)) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _DeadlineStream(httpcore.NetworkStream):
    """A network stream that waits no longer than the request's deadline."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._stream = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _get_remaining_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # The inner stream would begin anew to wait whenever a part has gone.
        connected = self._stream.get_extra_info("socket")
        is_tls = self._stream.get_extra_info("ssl_object") is not None
        if is_tls and not isinstance(connected, ssl.SSLSocket):
            # TLS within a proxy's TLS: the bytes must be encrypted by that stream first.
            self._stream.write(buffer, _get_remaining_s(timeout, httpcore.WriteTimeout))
            return
        rest = memoryview(buffer)
        while rest:
            remaining_s = _get_remaining_s(timeout, httpcore.WriteTimeout)
            try:
                connected.settimeout(remaining_s)
                rest = rest[connected.send(rest) :]
            except TimeoutError as error:
                raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        remaining_s = _get_remaining_s(timeout, httpcore.ConnectTimeout)
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, remaining_s))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
