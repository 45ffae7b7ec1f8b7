"""The settings of a gateway, which the process that starts it knows without gRPC."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from normserve.settings import Settings


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings of a gateway.

    Attributes:
        listen: HOST:PORT; the port 0 takes a free one.
        server: the URL of the server.
        grpc_max_message_bytes: the length of the longest message.
        max_inflight_bytes: memory for the messages of all calls.
        max_connections: number of open connections.
        keep_alive_s: time after which a connection without calls is closed.
        header_timeout_s: time for the first frames of a connection, and for a handshake of TLS.
        body_timeout_s: time for the message of a call.
        send_timeout_s: time for a client to read a response.
        drain_delay_s: time after a signal in which calls are still accepted.
        drain_s: time for calls in progress at the end.
        tls_cert, tls_key, tls_client_ca: PEM files, as the server's settings of these names.
        trusted_proxies, log_level, log_format: as the server's settings.
    """

    listen: str
    server: str
    grpc_max_message_bytes: int
    max_inflight_bytes: int
    max_connections: int
    keep_alive_s: float
    header_timeout_s: float
    body_timeout_s: float
    send_timeout_s: float
    drain_delay_s: float
    drain_s: float
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    trusted_proxies: str
    log_level: str
    log_format: str

    @classmethod
    def from_settings(cls, settings: Settings, listen: str, server: str) -> Self:
        """Take what the gateway and the server have in common from the server's settings."""
        return cls(listen, server, **{name: getattr(settings, name) for name in SHARED_SETTINGS})


SHARED_SETTINGS = tuple(each.name for each in fields(GatewaySettings) if each.name not in ("listen", "server"))
"""The settings of the server that a gateway has, too."""
