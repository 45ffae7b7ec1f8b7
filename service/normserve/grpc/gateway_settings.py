"""The settings of a gateway, which the process that starts it knows without gRPC."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from normserve.settings import Settings


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings of a gateway.

    Attributes:
        listen: HOST:PORT; the port 0 takes a free one.
        server: the URL of the server.
        max_message_bytes: the length of the longest message.
        max_inflight_bytes: memory for the messages of all calls.
        drain_delay_s: time after a signal in which calls are still accepted.
        drain_s: time for calls in progress at the end.
        tls_cert, tls_key, tls_client_ca: PEM files, as the server's settings of these names.
        trusted_proxies, log_level, log_format: as the server's settings.
    """

    listen: str
    server: str
    max_message_bytes: int
    max_inflight_bytes: int
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
        return cls(
            listen,
            server,
            settings.grpc_max_message_bytes,
            settings.max_inflight_bytes,
            settings.drain_delay_s,
            settings.drain_s,
            settings.tls_cert,
            settings.tls_key,
            settings.tls_client_ca,
            settings.trusted_proxies,
            settings.log_level,
            settings.log_format,
        )


SHARED_SETTINGS = (
    "grpc_max_message_bytes",
    "max_inflight_bytes",
    "drain_delay_s",
    "drain_s",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "trusted_proxies",
    "log_level",
    "log_format",
)
"""The settings of the server that a gateway has, too."""
