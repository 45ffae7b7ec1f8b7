"""All settings.  Only this module reads the server's own environment variables, `NORMSERVE_…`."""

import difflib
import ipaddress
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

_HOST = r"([A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?)"
_CORES_FOR_FRONTENDS, _MOST_AUTOMATIC = 4, 8
_ORIGIN = r"https?://[^/?#@*,\s]+"

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]i?B)", re.ASCII)
_UNITS = {
    f"{letter}{kind}": base**power
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("KMGT", 1)
}


def _parse_size(value: object) -> object:
    """Convert a size with a unit, such as 1.5GiB or 512 MB, to bytes; return any other value unchanged for
    pydantic to check.
    """
    if not isinstance(value, str) or value.strip().isdecimal():
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"must be a number of bytes, or one with a unit, as in 512MiB or 2GB, got {value[:100]!r}")
    return int(Decimal(found[1]) * _UNITS[found[2]])


#: Settings of earlier versions, each with what to do instead.
REMOVED = {
    "local_own_memory": "the server copies tensors that lie in a client's own GPU memory; to avoid the copy, make "
    "them in shared memory: client.empty(shape, dtype, device='cuda')",
}

Size = Annotated[int, BeforeValidator(_parse_size)]
"""A number of bytes, optionally with a unit: KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (of 1000)."""


def _make_pattern_validator(pattern: str, expected: str, *, shows_value: bool = True) -> AfterValidator:
    """Make a pydantic validator that requires a text to match a regular expression as a whole.

    Args:
        expected: the description of a valid text, for the error message.
        shows_value: whether the error may repeat the text, which may be secret.
    """

    def check(text: str) -> str:
        if re.fullmatch(pattern, text, re.ASCII) is None:
            got = f", got {text[:100]!r}" if shows_value else ""
            raise ValueError(f"must be {expected}{got}")
        return text

    return AfterValidator(check)


def _check_networks(text: str) -> str:
    """Raise an error unless a text is empty or a list of IP networks and addresses."""
    for each in text.split(",") if text else ():
        try:
            network = ipaddress.ip_network(each)
        except ValueError as error:
            raise ValueError(
                "must be networks or addresses with commas between them, as in 10.0.0.0/8,fd00::1;"
                f" got {each[:100]!r}: {error}"
            ) from None
        # Addresses that are mapped to IPv6 are compared as those of IPv4, and would never match.
        if network.version == 6 and network.network_address.ipv4_mapped is not None:
            raise ValueError(f"must have networks of IPv4 as in 10.0.0.0/8, without ::ffff:, got {each[:100]!r}")
    return text


class Settings(BaseSettings):
    """The server's settings, each from `NORMSERVE_<NAME>` in the environment or from `--<name>` on the
    command line.
    """

    model_config = SettingsConfigDict(env_prefix="NORMSERVE_", frozen=True, extra="forbid")

    host: str = Field(
        "127.0.0.1",
        description="Address or name to listen on; 0.0.0.0 for all of IPv4, :: for all of IPv4 and IPv6.",
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    uds: Path | None = Field(None, description="Path of an additional Unix domain socket to listen on.")
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port for KServe's gRPC, served by a process of its own; 0 takes a free one. Needs the "
        "extra `grpc`.",
    )
    grpc_max_message_bytes: Size = Field(
        2**27,
        ge=2**20,
        le=2**31 - 1,
        description="Maximum size of a gRPC message. The gateway reserves as much memory for each message that it "
        "receives, of the maximum memory of concurrent requests.",
    )
    local: Path | None = Field(
        None,
        description="Path of a Unix domain socket for clients on this host that share memory with the server.",
    )
    local_users: Annotated[
        str,
        _make_pattern_validator(
            r"(\d{1,10}(=[A-Za-z0-9._-]{1,64})?(,\d{1,10}(=[A-Za-z0-9._-]{1,64})?)*)?",
            "numeric user ids with commas between them, each alone or with a key's name, as in 1000,1001=batch",
        ),
    ] = Field(
        "",
        description="Numeric ids of users that may connect in addition to the server's own, as in "
        "1000,1001=batch: the second has the scopes and limits of the API key with that "
        "name.",
    )
    local_bytes: Size = Field(
        2**30, ge=2**20, description="Bytes of shared memory for all --local connections of one user."
    )
    local_device_bytes: Size = Field(
        2**30,
        ge=0,
        description="Bytes of device memory for all --local connections of one user; 0 for none.",
    )
    local_connections: int = Field(64, ge=1, description="Maximum number of --local connections of one user.")
    oip_shared_memory: Annotated[
        str,
        _make_pattern_validator(
            r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})?",
            "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first of them not a dot, as in norms-",
        ),
    ] = Field(
        "",
        description="Prefix of shared-memory names that clients of /v2 may register; the memory "
        "must belong to the server's user. Empty: clients may register none. Every client "
        "that may send requests can read and write all shared memory with such a name.",
    )
    oip_shared_memory_bytes: Size = Field(
        4 * 2**30,
        ge=1,
        description="Maximum bytes of shared-memory and CUDA regions registered by all clients together.",
    )
    oip_cuda_shared_memory: bool = Field(
        False,
        description="Let clients of /v2 on loopback or the Unix socket register CUDA memory that "
        "they have allocated; the server uses it without a copy. A client that frees it"
        " while it is in use can crash the server.",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the server's certificate and its chain; the TCP port then uses "
        "TLS. The server reads this file and those of the next two settings again on SIGHUP.",
    )
    tls_key: Path | None = Field(
        None,
        description="PEM file with the certificate's key, not encrypted; by default it is read from --tls-cert.",
    )
    tls_client_ca: Path | None = Field(
        None, description="PEM file with certificate authorities; clients must have a certificate from one of them."
    )
    backend: Literal["auto", "triton", "torch"] = Field(
        "auto", description="triton needs a CUDA device, torch runs on the CPU; auto uses triton if possible."
    )
    devices: Annotated[
        str,
        _make_pattern_validator(
            r"((cpu|\d{1,3})(,(cpu|\d{1,3}))*)?",
            "numbers of CUDA devices, or cpu, with commas between them, as in 0,1",
        ),
    ] = Field(
        "",
        description="CUDA devices by number, or cpu, as in 0,1: one process per device, all on one port.",
    )
    frontends: Annotated[str, _make_pattern_validator(r"auto|\d{1,3}", "auto or a number of at most 999")] = Field(
        "0",
        description="Number of HTTP processes in front of those that own a device; 0 for none; auto"
        " to choose by the number of cores.",
    )
    checkpoint: Path | None = Field(
        None, description="A .safetensors file whose norm layers are registered before the server is ready."
    )
    checkpoint_op: Literal["layer_norm", "rms_norm"] | None = Field(
        None,
        description="The operation of the checkpoint's norms without a bias. By default they are RMSNorms if their"
        " names contain rms or config.json beside the checkpoint has rms_norm_eps, and are left out otherwise.",
    )
    api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="API key that clients must send as `Authorization: Bearer KEY`, except for "
        "probes, pages and /metrics.",
    )
    api_keys_file: Path | None = Field(
        None, description="TOML file of named API keys, instead of --api-key; /metrics then needs a key as well."
    )
    allowed_hosts: Annotated[
        str,
        _make_pattern_validator(
            rf"(\*|{_HOST}(,{_HOST})*)?",
            "* or names and addresses without ports, with commas between them, as in api.example,10.0.0.5",
        ),
    ] = Field(
        "",
        description="Host names that requests may use besides loopback, as in api.example,10.0.0.5;"
        " * allows all. Empty: no others if the server listens on a loopback address, "
        "otherwise all.",
    )
    cors_origins: Annotated[
        str,
        _make_pattern_validator(
            rf"({_ORIGIN}(,{_ORIGIN})*)?",
            "origins without a path, with commas between them, as in https://app.example,http://localhost:3000",
        ),
    ] = Field(
        "",
        description="Origins whose pages may use the server (CORS), as in https://app.example; "
        "empty: only the server's own pages.",
    )
    trusted_proxies: Annotated[str, AfterValidator(_check_networks)] = Field(
        "",
        description="Networks of the proxies before the server, as in 10.0.0.0/8,fd00::1. A request from one of "
        "them has its client's address in X-Forwarded-For, for logs, shares and limits. Empty: that header is "
        "ignored.",
    )
    root_path: Annotated[
        str,
        _make_pattern_validator(
            r"(/[A-Za-z0-9._~-]+)*", "a path that begins with a slash and ends with none, as in /norm"
        ),
    ] = Field(
        "",
        description="Path below which a proxy offers the server without removing it from requests, as in /norm. "
        "Requests without it are answered, too.",
    )
    max_body_bytes: Size = Field(2**30, ge=1, description="Maximum size of a request body.")
    max_inflight_requests: int = Field(
        256, ge=1, description="Maximum number of concurrent requests; others receive status 429."
    )
    max_inflight_bytes: Size = Field(
        4 * 2**30,
        ge=1,
        description="Maximum memory of concurrent requests: bodies, results and temporary buffers.",
    )
    max_connections: int = Field(
        4096, ge=1, description="Maximum number of open connections to all processes; others receive status 503."
    )
    max_connections_per_address: int = Field(
        2048,
        ge=1,
        description="Maximum number of open connections from one IPv4 address, IPv6 /64 network or "
        "user of the Unix socket. Those of --trusted-proxies have no such limit.",
    )
    max_idle_slab_bytes: Size = Field(
        2**30, ge=0, description="Maximum memory kept for the bodies and results of later requests."
    )
    max_layers: int = Field(10_000, ge=0, description="Maximum number of registered layers.")
    max_layer_bytes: Size = Field(
        2**28, ge=0, description="Maximum device memory for the parameters of all registered layers."
    )
    timeout_ms: float = Field(
        30_000, gt=0, description="Default deadline: time from a request's arrival to its start on the device."
    )
    max_batch_requests: int = Field(
        64, ge=1, description="Maximum number of requests in one launch; 1 disables batching."
    )
    max_batch_bytes: Size = Field(
        4 * 2**20, ge=0, description="Maximum size of the tensors in one launch; a larger request runs alone."
    )
    warm_sizes: Annotated[
        str,
        _make_pattern_validator(
            r"[1-9]\d{0,8}(,[1-9]\d{0,8})*",
            "whole numbers above 0, of at most nine digits, with commas between them, as in 768,4096",
        ),
    ] = Field(
        "1024",
        description="Row lengths for which kernels are compiled before the server is ready, as in 768,4096.",
    )
    max_compiled_classes: int = Field(
        4096,
        ge=1,
        description="Maximum number of request classes (operation, types, row length, options) with"
        " compiled kernels.",
    )
    max_compiles_per_minute: int = Field(
        60,
        ge=1,
        description="Maximum number of request classes compiled per minute, not counting those compiled at start.",
    )
    cpu_threads: int = Field(
        0, ge=0, le=1024, description="Threads of the torch backend; 0 leaves one core to the network."
    )
    header_timeout_s: float = Field(10, gt=0, description="Maximum time until a request's header is complete.")
    body_timeout_s: float = Field(30, gt=0, description="Maximum pause while a request body is received.")
    min_body_bytes_per_s: float = Field(
        4096,
        ge=0,
        description="Minimum mean rate of a request body, and of a response to a slow reader, after"
        " --body-grace-s; 0 for none.",
    )
    body_grace_s: float = Field(
        10,
        gt=0,
        description="Time after which the minimum rate applies; a fifth of it if other requests "
        "wait for the memory.",
    )
    send_timeout_s: float = Field(30, gt=0, description="Maximum pause while a response is read by the client.")
    transfer_timeout_s: float = Field(
        300, gt=0, description="Maximum time for a request body, and for a response to a slow reader."
    )
    keep_alive_s: float = Field(
        75, gt=0, allow_inf_nan=False, description="Time after which an idle connection is closed."
    )
    drain_s: float = Field(30, gt=0, description="Maximum time to finish admitted requests after SIGTERM.")
    drain_delay_s: float = Field(
        0,
        ge=0,
        le=3600,
        description="Time after SIGTERM in which requests are still accepted while /readyz fails, so that load "
        "balancers choose other servers before the drain; an hour at most.",
    )
    stall_s: float = Field(
        60,
        gt=0,
        description="Time after which the server is not ready if operations wait and none finishes.",
    )
    hang_s: float = Field(
        20,
        gt=0,
        description="A process of --devices or --frontends that does not respond for this long is "
        "killed and restarted.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level of log events."
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of log events: text or JSON.")
    access_log: bool = Field(False, description="Log each completed request, whatever the log level.")
    access_log_probes: bool = Field(
        True,
        description="Whether --access-log includes probes and scrapes: /livez, /readyz, /metrics. "
        "--no-access-log-probes leaves them out.",
    )
    trace_endpoint: (
        Annotated[
            str,
            _make_pattern_validator(
                r"https?://[^/?#@\s]+(/[^?#\s]*)?",
                "a URL without user, password or query, as in http://localhost:4318",
                shows_value=False,
            ),
        ]
        | None
    ) = Field(
        None,
        description="URL to which OpenTelemetry traces are sent by OTLP over HTTP, as "
        "http://localhost:4318; needs the extra `otel`.",
    )
    trace_ratio: float = Field(
        0.01, ge=0, le=1, description="Fraction to trace of the requests without a sampled traceparent."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed_settings(cls, values: Any) -> Any:
        """Raise an error that names the replacement if a setting of an earlier version is given."""
        given = {name.upper() for name in os.environ}
        for name, instead in REMOVED.items():
            variable = f"{cls.model_config['env_prefix']}{name}".upper()
            if name in values or variable in given:
                raise ValueError(
                    f"--{name.replace('_', '-')} ({variable}) no longer exists; leave it out: {instead}"
                )
        return values

    @model_validator(mode="after")
    def _refuse_two_key_sources(self) -> Self:
        """Raise an error if both a single API key and a file of API keys are given."""
        if self.api_key is not None and self.api_keys_file is not None:
            raise ValueError("--api-key and --api-keys-file must not be given together")
        return self

    @model_validator(mode="after")
    def _refuse_shared_socket_path(self) -> Self:
        """Raise an error if HTTP and shared memory clients would have the same Unix socket path."""
        if self.uds is not None and self.local is not None and self.uds.absolute() == self.local.absolute():
            raise ValueError("--uds and --local must be two paths: the protocols are different")
        return self

    @model_validator(mode="after")
    def _refuse_regions_with_several_devices(self) -> Self:
        """Raise an error if KServe shared memory regions are enabled with several devices.  Each device has its
        own process, but only one would know a region.
        """
        for option, is_on in (
            ("--oip-shared-memory", self.oip_shared_memory),
            ("--oip-cuda-shared-memory", self.oip_cuda_shared_memory),
        ):
            if is_on and "," in self.devices:
                raise ValueError(f"{option} needs one process: a region is registered with the one that is asked")
        return self

    @property
    def frontend_count(self) -> int:
        """The number of front end processes, which serve HTTP for the processes that own devices.  With `auto`
        it depends on the CPU cores; 0 for none.
        """
        if self.frontends != "auto":
            return int(self.frontends)
        cores = len(os.sched_getaffinity(0))
        # With fewer cores, the process that owns the device needs all of them.
        return 0 if cores < _CORES_FOR_FRONTENDS else min(cores // 2, _MOST_AUTOMATIC)

    def dump_masked(self) -> dict[str, Any]:
        """Return all settings as JSON values, with secrets masked."""
        return self.model_dump(mode="json")

    def dump_changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults as JSON values, with secrets masked."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @field_validator("tls_key", "tls_client_ca")
    @classmethod
    def _require_certificate(cls, path: Path | None, others: ValidationInfo) -> Path | None:
        """Raise an error if a TLS key or client CA is set without a certificate."""
        if path is not None and others.data.get("tls_cert") is None:
            raise ValueError("needs --tls-cert")
        return path


def find_unknown_variables() -> dict[str, str]:
    """Return the environment variables with the prefix NORMSERVE_ that are no settings, each with the
    closest setting's variable, or "" if none is close.
    """
    prefix = str(Settings.model_config["env_prefix"])
    known_names = {f"{prefix}{name}".upper() for name in Settings.model_fields}
    unknown = sorted(
        name for name in os.environ if name.upper().startswith(prefix) and name.upper() not in known_names
    )
    return {name: next(iter(difflib.get_close_matches(name.upper(), known_names, 1)), "") for name in unknown}


def make_device_environment(device: str) -> dict[str, str]:
    """Return a copy of `os.environ` with CUDA_VISIBLE_DEVICES set, so that a process sees only one device.

    Args:
        device: an entry of `--devices`: a CUDA device's number or "cpu"; "" for a process that sees all devices.
    """
    if not device:
        return dict(os.environ)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    numbers = seen.split(",") if seen else []
    return {**os.environ, "CUDA_VISIBLE_DEVICES": numbers[int(device)] if int(device) < len(numbers) else device}
