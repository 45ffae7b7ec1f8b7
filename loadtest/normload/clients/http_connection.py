"""A connection of the load test: that of `normserve.client`, opened at its first use and again after it broke.

A body is sent without a copy, and a response received into memory that is already mapped.  One thread drives many
connections by their `steps`.
"""

from collections.abc import Sequence
from socket import AF_UNIX, SOCK_STREAM, getaddrinfo

import httpx
from normserve.client import ConnectionFailedError, UnexpectedAnswerError
from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError
from normserve.client.http import connection as http
from normserve.client.http.connection import IncompleteResponseError
from normserve.client.http.connection_pool import run_steps
from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_opening import (
    Place,
    TlsSettings,
    connect,
    do_handshake,
    list_socket_addresses,
    make_socket,
    wrap_tls,
)
from normserve.client.http.socket_steps import Steps
from normserve.client.responses.api_response import ApiResponse

from normload.clients.prepared_requests import PreparedRequest

# Shared, because reading the trusted certificates takes longer than a handshake.
_TRUST = TlsSettings(verify=True)


class SteppedConnection:
    """The base class of connections on which a generator sends each request and receives its response.  The
    generator yields whenever it must wait for a socket.
    """

    def __init__(self, timeout_s: float) -> None:
        """Args: timeout_s: longest time of an exchange."""
        self.timeout_s = timeout_s

    def run_steps(self, steps: Steps[ApiResponse]) -> ApiResponse:
        """Run an exchange's generator to its end, waiting for the socket whenever it yields; return the response.

        Raises:
            ConnectionFailedError: there is no connection, or it broke.
            RequestTimeoutError: there was no complete response in time.
            UnexpectedAnswerError: the received bytes are not a valid response, or longer than one can be.
        """
        deadline = Deadline(self.timeout_s)
        try:
            return run_steps(steps, deadline)
        except httpx.TimeoutException as error:
            raise deadline.make_error() from error
        except FAILURES as error:
            raise translate_failure(error) from error


class HttpLoadConnection(SteppedConnection):
    """An HTTP connection that opens at its first request, and again at the first request after an error."""

    def __init__(self, address: ServerAddress, timeout_s: float) -> None:
        """Args:
        address: of the server.
        timeout_s: longest time of an exchange, from connecting to the last byte of the response.
        """
        super().__init__(timeout_s)
        self._address = address
        self._connection: http.ClientHttpConnection | None = None
        # Memory that was used before is mapped already; new memory is faulted in page by page.
        self._response_buffer: memoryview | None = None

    def exchange(self, head: bytes, parts: Sequence[bytes | memoryview], most_bytes: int) -> ApiResponse:
        """Send one request and return its response, whose body is valid until the next exchange.

        Args:
            head, parts: of the request.
            most_bytes: largest possible body of a successful response; an error's is dropped if it is longer.

        Raises:
            ClientError: as `run_steps`.
        """
        return self.run_steps(self._exchange_bytes_in_steps(head, parts, most_bytes))

    def exchange_in_steps(self, request: PreparedRequest) -> Steps[ApiResponse]:
        """Return a generator that exchanges a request for its response, for a caller with its own event loop.

        Nothing is sent before its first step.  It raises only `FAILURES`.
        """
        return self._exchange_bytes_in_steps(request.head, request.parts, request.max_response_bytes)

    def _exchange_bytes_in_steps(
        self, head: bytes, parts: Sequence[bytes | memoryview], most_bytes: int
    ) -> Steps[ApiResponse]:
        """Send a request and receive its response, as a generator that yields whenever it must wait for the socket.

        The connection is opened if it is closed or the server has ended it.  It is closed after an error,
        and if the server does not keep it.
        """
        # The server may have closed the connection between requests: then its end can be read.
        if self._connection is not None and not self._connection.is_quiet():
            self.close()
        try:
            if self._connection is None:
                self._connection = yield from self._open_in_steps()
            answer = yield from self._connection.exchange(head, parts, most_bytes, self._response_buffer)
        except BaseException:
            self.close()
            raise
        if self._response_buffer is None or len(answer.body) > len(self._response_buffer):
            self._response_buffer = answer.body
        if not self._connection.is_reusable:
            self.close()
        return answer

    def detach_response(self) -> None:
        """Leave the memory of the last response to the caller."""
        self._response_buffer = None

    def close(self) -> None:
        """Close the connection, if it is open; the next exchange opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open_in_steps(self) -> Steps[http.ClientHttpConnection]:
        """Connect to the first address of the host that accepts, with TLS if the URL requires it.  The generator
        yields whenever it must wait for the socket.

        Raises:
            OSError: of the last address, if none accepts.
        """
        failure = OSError("the host has no address")
        for family, where in self._resolve_addresses():
            made = make_socket(family)
            try:
                yield from connect(made, where)
                if self._address.is_tls:
                    secured = wrap_tls(made, self._address, _TRUST.context)
                    made = secured
                    yield from do_handshake(secured)
                return http.ClientHttpConnection(made)
            except OSError as error:
                made.close()
                failure = error
            except BaseException:
                made.close()
                raise
        raise failure

    def _resolve_addresses(self) -> list[Place]:
        if self._address.socket_path is not None:
            return [(AF_UNIX, self._address.socket_path)]
        return list_socket_addresses(getaddrinfo(self._address.host, self._address.port, type=SOCK_STREAM))


#: Errors that end an exchange without a response; a UnicodeError: the host name cannot be encoded for a query.
FAILURES = (ClientError, httpx.TransportError, OSError, UnicodeError)


def translate_failure(failure: BaseException) -> ClientError:
    """Convert the exception with which an exchange failed, one of `FAILURES`, to a `ClientError`."""
    if isinstance(failure, ClientError):
        return failure
    if isinstance(failure, httpx.RemoteProtocolError) and not isinstance(failure, IncompleteResponseError):
        return UnexpectedAnswerError("the answer is not HTTP")
    return ConnectionFailedError(str(failure) or type(failure).__name__)
