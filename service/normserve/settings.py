"""Everything that can be set, and the only place that reads the environment."""

import difflib
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator
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


def _read_size(value: object) -> object:
    """Bytes of a size with a unit, as 1.5GiB or 512 MB; anything else as it is."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return value if found is None else int(Decimal(found[1]) * _UNITS[found[2]])


Size = Annotated[int, BeforeValidator(_read_size)]
"""A number of bytes, also with a unit: KiB, MiB, GiB and TiB, or KB, MB, GB and TB of 1000."""


class Settings(BaseSettings):
    """The server's configuration: `NORMSERVE_<NAME>` in the environment, or the command line's `--<name>`."""

    model_config = SettingsConfigDict(env_prefix="NORMSERVE_", frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    uds: Path | None = Field(None, description="Path of a Unix domain socket to listen on as well.")
    local: Path | None = Field(
        None,
        description="Path of a Unix domain socket for clients on this host that share memory with the server.",
    )
    local_users: str = Field(
        "",
        pattern=r"^(\d{1,10}(=[A-Za-z0-9._-]{1,64})?(,\d{1,10}(=[A-Za-z0-9._-]{1,64})?)*)?$",
        description="Users by number who may connect there beside the server's own, as in 1000,1001=batch: the"
        " second has the scopes and limits of the API key of that name.",
    )
    local_bytes: Size = Field(
        2**30, ge=2**20, description="Bytes of shared memory that the connections of one user may have together."
    )
    local_device_bytes: Size = Field(
        2**30,
        ge=0,
        description="Bytes of the device's memory that the connections of one user may have together, or 0.",
    )
    local_own_memory: bool = Field(
        False,
        description="Let processes of the server's own user have memory of the device used that they have allocated"
        " themselves, without a copy. One that frees it while it is used can end the server.",
    )
    local_connections: int = Field(
        64, ge=1, description="Connections to that socket that one user may have open at once."
    )
    oip_shared_memory: str = Field(
        "",
        pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})?$",
        description="Clients of /v2 may register shared memory of this host that belongs to the server's user and"
        " whose name begins so. Empty: none. Who may send requests may read and write all memory of such names.",
    )
    oip_shared_memory_bytes: Size = Field(
        4 * 2**30,
        ge=1,
        description="Bytes of regions, of that memory and of CUDA memory, that all clients may have registered at"
        " once.",
    )
    oip_cuda_shared_memory: bool = Field(
        False,
        description="Clients of /v2 that come over loopback or the Unix socket may register CUDA memory that they"
        " have allocated, and have it read and written without a copy. One that frees it while it is used can end"
        " the server.",
    )
    tls_cert: Path | None = Field(
        None,
        description="A PEM file with the server's certificate and those up to its authority: the port speaks TLS."
        " Read again on SIGHUP, as are the next two.",
    )
    tls_key: Path | None = Field(
        None, description="A PEM file with the certificate's key, not encrypted; else --tls-cert holds it."
    )
    tls_client_ca: Path | None = Field(
        None, description="A PEM file with authorities: a client must have a certificate of one of them."
    )
    backend: Literal["auto", "triton", "torch"] = Field(
        "auto", description="triton needs a CUDA device, torch runs on the CPU; auto takes triton if it can."
    )
    devices: str = Field(
        "",
        pattern=r"^((cpu|\d{1,3})(,(cpu|\d{1,3}))*)?$",
        description="CUDA devices by number, or cpu, as in 0,1: a process for each behind one port.",
    )
    frontends: str = Field(
        "0",
        pattern=r"^(auto|\d{1,3})$",
        description="Processes that speak HTTP for those that own a device; 0 for none, auto for as many as suit"
        " the cores.",
    )
    checkpoint: Path | None = Field(
        None, description="A .safetensors file whose norm layers are registered before the server is ready."
    )
    api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="If set, all but the probes, the pages and /metrics ask for it as `Authorization: Bearer KEY`.",
    )
    api_keys_file: Path | None = Field(
        None, description="A TOML file of named API keys in place of that one; /metrics asks for one, too."
    )
    allowed_hosts: str = Field(
        "",
        pattern=rf"^(\*|{_HOST}(,{_HOST})*)?$",
        description="What a request's Host may name beside loopback, as in api.example,10.0.0.5; * is anything."
        " Empty: nothing else on a loopback address, anything on another.",
    )
    cors_origins: str = Field(
        "",
        pattern=rf"^({_ORIGIN}(,{_ORIGIN})*)?$",
        description="Origins whose pages may use the server (CORS), as in https://app.example; else only its own.",
    )
    max_body_bytes: Size = Field(2**30, ge=1, description="Longest request body; a longer one is refused.")
    max_inflight_requests: int = Field(
        256, ge=1, description="Requests inside the server at once; the next one is told to come back later."
    )
    max_inflight_bytes: Size = Field(
        4 * 2**30,
        ge=1,
        description="Bytes inside at once: of request bodies, of their results and of what computing them needs.",
    )
    max_connections: int = Field(
        4096, ge=1, description="Connections open at once, over all processes; the next one is answered 503."
    )
    max_connections_per_address: int = Field(
        2048,
        ge=1,
        description="Of those, from one IPv4 address, IPv6 /64 network or user of the Unix socket: as many as a "
        "proxy needs, and not all.",
    )
    max_idle_slab_bytes: Size = Field(
        2**30, ge=0, description="Bytes of memory kept for the bodies and results of requests to come."
    )
    max_layers: int = Field(10_000, ge=0, description="Registered layers at once.")
    max_layer_bytes: Size = Field(
        2**28, ge=0, description="Bytes of registered layers' parameters at once, on the device."
    )
    timeout_ms: float = Field(
        30_000, gt=0, description="Deadline from a request's arrival to its start on the device, by default."
    )
    max_batch_requests: int = Field(64, ge=1, description="Requests that may share a launch; 1 turns batching off.")
    max_batch_bytes: Size = Field(
        4 * 2**20, ge=0, description="Bytes of tensors that may share a launch; a larger request runs alone."
    )
    warm_sizes: str = Field(
        "1024",
        pattern=r"^[1-9]\d{0,8}(,[1-9]\d{0,8})*$",
        description="Lengths of rows whose kernels are there before the server is ready, as in 768,4096.",
    )
    max_compiled_classes: int = Field(
        4096,
        ge=1,
        description="Classes of requests (operation, types, row length, options) with kernels of their own.",
    )
    max_compiles_per_minute: int = Field(
        60, ge=1, description="Most classes of requests compiled in a minute, beyond those compiled at start."
    )
    cpu_threads: int = Field(0, ge=0, description="Threads of the torch backend; 0 leaves one core to the network.")
    header_timeout_s: float = Field(10, gt=0, description="Longest wait for a request's complete header.")
    body_timeout_s: float = Field(30, gt=0, description="Longest pause while a body is received.")
    min_body_bytes_per_s: float = Field(
        4096,
        ge=0,
        description="Least mean rate of a body, and of a response whose client reads slowly, once the first seconds"
        " are over; 0 for none.",
    )
    body_grace_s: float = Field(
        10, gt=0, description="After how long that rate counts; a fifth of it where others want a body's place."
    )
    send_timeout_s: float = Field(30, gt=0, description="Longest pause of a client that reads its response.")
    transfer_timeout_s: float = Field(
        300, gt=0, description="Longest time that a body may take, or a response once its client reads slowly."
    )
    keep_alive_s: float = Field(75, gt=0, description="How long an idle connection stays open.")
    drain_s: float = Field(30, gt=0, description="Longest wait for admitted work after SIGTERM.")
    stall_s: float = Field(
        60, gt=0, description="Not ready once work has waited for so long and none of it was finished."
    )
    hang_s: float = Field(
        20, gt=0, description="A process of --devices that gives no sign for so long is killed and started again."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged.")
    log_format: Literal["text", "json"] = Field("text", description="How it is logged: lines to read, or JSON.")
    access_log: bool = Field(False, description="Log each request at its end, whatever the level.")
    trace_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$",
        description="Where to send OpenTelemetry traces by OTLP over HTTP, as http://localhost:4318; it takes the"
        " extra `otel`.",
    )
    trace_ratio: float = Field(
        0.01, ge=0, le=1, description="Share of requests traced of those whose traceparent does not ask for it."
    )

    @model_validator(mode="after")
    def _has_one_source_of_keys(self) -> Self:
        if self.api_key is not None and self.api_keys_file is not None:
            raise ValueError("--api-key and --api-keys-file must not be given together")
        return self

    @model_validator(mode="after")
    def _registers_in_one_process(self) -> Self:
        for option, is_on in (
            ("--oip-shared-memory", self.oip_shared_memory),
            ("--oip-cuda-shared-memory", self.oip_cuda_shared_memory),
        ):
            if is_on and "," in self.devices:
                raise ValueError(f"{option} needs one process: a region is registered with the one that is asked")
        return self

    @property
    def frontend_count(self) -> int:
        """How many processes speak HTTP for those that own a device."""
        if self.frontends != "auto":
            return int(self.frontends)
        cores = len(os.sched_getaffinity(0))
        # Of fewer cores the process with the device needs what there is.
        return 0 if cores < _CORES_FOR_FRONTENDS else min(cores // 2, _MOST_AUTOMATIC)

    def shown(self) -> dict[str, Any]:
        """Every setting as JSON has it, secrets masked."""
        return self.model_dump(mode="json")

    def changed(self) -> dict[str, Any]:
        """Those that differ from their defaults, as `shown` has them."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @field_validator("tls_key", "tls_client_ca")
    @classmethod
    def _require_certificate(cls, path: Path | None, others: ValidationInfo) -> Path | None:
        if path is not None and others.data.get("tls_cert") is None:
            raise ValueError("needs --tls-cert")
        return path


def unknown_in_environment() -> dict[str, str]:
    """Variables that begin as settings do and are none, each with the name that comes closest, or ""."""
    prefix = str(Settings.model_config["env_prefix"])
    known = {f"{prefix}{name}".upper() for name in Settings.model_fields}
    unknown = sorted(name for name in os.environ if name.upper().startswith(prefix) and name.upper() not in known)
    return {name: next(iter(difflib.get_close_matches(name.upper(), known, 1)), "") for name in unknown}


def environment_of(device: str) -> dict[str, str]:
    """The environment of a process that owns a device of `--devices`: it sees no other.  "" is all there are."""
    if not device:
        return dict(os.environ)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    numbers = seen.split(",") if seen else []
    return {**os.environ, "CUDA_VISIBLE_DEVICES": numbers[int(device)] if int(device) < len(numbers) else device}
