"""Replicas: processes of one application that another program starts, stops and sends requests to.

Such replicas know neither their number nor each other's addresses; they share a `ReplicaMetricsTable`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, model_validator

from normserve.errors import MethodNotAllowedError
from normserve.metrics.exposition import merge_expositions
from normserve.peers.sibling_processes import SiblingProcesses
from normserve.settings import Settings

# Interval at which replicas publish metrics, so the largest age of another's metrics in a scrape.
_POST_S = 2.0
# A replica that has published nothing for this long is regarded as ended.
_FRESH_S = 10.0
_ANSWER_S = 2.0

#: Publishes a process's text in the table under an increasing number; returns the texts of all replicas.
BoardCall = Callable[[str, int, bytes], Awaitable[Mapping[str, bytes]]]


class ReplicaScaling(BaseModel):
    """The configuration of a Ray Serve deployment: the number of replicas, and the device and CPU cores of each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "gpu"] = "cpu"
    cpus_per_replica: float = Field(1.0, gt=0)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(16.0, gt=0)

    @model_validator(mode="after")
    def _require_max_above_min(self) -> "ReplicaScaling":
        """Validate that `max_replicas` is at least `min_replicas`."""
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas must be at least min_replicas, got {self.max_replicas}")
        return self

    def make_replica_settings(self, settings: Settings) -> Settings:
        """Return a copy of the settings for one replica.  It has the device's backend and its number of CPU
        threads, and accepts any host name unless allowed hosts are set.

        Raises:
            ValueError: the settings enable clients that share memory, which needs one process on their host, or
                front ends or gRPC, although Ray's proxies have the connections.
        """
        if settings.local is not None:
            raise ValueError(
                f"NORMSERVE_LOCAL must not be set for Ray Serve, got {str(settings.local)!r}: "
                "clients share memory with `normserve serve` on their own host"
            )
        if settings.oip_cuda_shared_memory:
            raise ValueError(
                "NORMSERVE_OIP_CUDA_SHARED_MEMORY must not be set for Ray Serve: "
                "a replica cannot tell whether a client is on its host"
            )
        if settings.oip_shared_memory and self.max_replicas > 1:
            raise ValueError(
                f"NORMSERVE_OIP_SHARED_MEMORY needs one process, got max_replicas {self.max_replicas}: "
                "a region is registered with the replica that is asked"
            )
        if settings.frontends != "0":
            raise ValueError(
                f"NORMSERVE_FRONTENDS must not be set for Ray Serve, got {settings.frontends!r}: "
                "Ray's own proxies have the connections"
            )
        if settings.grpc_port is not None:
            raise ValueError(
                f"NORMSERVE_GRPC_PORT must not be set for Ray Serve, got {settings.grpc_port}: "
                "start `normserve grpc` with the URL of Ray's proxy"
            )
        backend = "triton" if self.device == "gpu" else "torch"
        threads = settings.cpu_threads or max(1, int(self.cpus_per_replica))
        own = {"backend": backend, "cpu_threads": threads, "uds": None, "devices": ""}
        # The settings do not have the address at which Ray's proxy listens.
        own["allowed_hosts"] = settings.allowed_hosts or "*"
        return settings.model_copy(update=own)

    def make_deployment_options(self, settings: Settings) -> dict[str, Any]:
        """Return the keyword arguments of `serve.deployment`: resources, autoscaling, and shutdown and health
        check times.
        """
        return {
            "ray_actor_options": {"num_cpus": self.cpus_per_replica, "num_gpus": int(self.device == "gpu")},
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests,
            },
            # More than a replica admits, so that the replica refuses requests, with its own error.
            "max_ongoing_requests": 2 * settings.max_inflight_requests,
            "graceful_shutdown_timeout_s": settings.drain_s,
            "health_check_period_s": 2.0,
        }


class ReplicaMetricsTable:
    """A table of the last metrics that each replica published, as Prometheus text.  One process has the
    table, and all replicas call it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[str, tuple[int, float, bytes]] = {}

    def publish(self, process: str, version: int, text: bytes) -> dict[str, bytes]:
        """Store a replica's metrics text, unless a later version is stored already.  Return the texts of all live
        replicas.

        Replicas that have not published for ten seconds are dropped.

        Args:
            process: the replica's name.
            version: increases with each text of a replica.
        """
        now = self._clock()
        if process not in self._states or self._states[process][0] < version:
            self._states[process] = (version, now, text)
        self._states = {name: note for name, note in self._states.items() if now - note[1] <= _FRESH_S}
        return {name: state_text for name, (_, _, state_text) in self._states.items()}


class ReplicaSiblings(SiblingProcesses):
    """The other replicas of a Ray Serve deployment, which exchange metrics through a shared
    `ReplicaMetricsTable`.
    """

    def __init__(self, name: str, exchange: BoardCall) -> None:
        super().__init__(None)
        self.process_label = self._name = name
        self._publish_text = exchange
        self._version = 0

    async def render_metrics(self, own: bytes) -> bytes:
        """Return the metrics of all live replicas, or only this replica's if the `ReplicaMetricsTable` does not
        answer.

        This replica's metrics are published first, so that no counter decreases if another replica is scraped next.

        Args:
            own: the metrics text of this replica.
        """
        texts = dict(await self._publish(own))
        texts[self._name] = own
        return merge_expositions(texts, texts)

    async def publish_regularly(self, render: Callable[[], bytes]) -> None:
        """Publish this replica's metrics every two seconds, until cancelled."""
        while True:
            await self._publish(render())
            await asyncio.sleep(_POST_S)

    async def _publish(self, text: bytes) -> Mapping[str, bytes]:
        """Publish this replica's metrics text with the next version number, and return the texts of all live
        replicas.  Return {} if the `ReplicaMetricsTable` does not answer in time.
        """
        self._version += 1
        with contextlib.suppress(TimeoutError, ConnectionError):
            return await asyncio.wait_for(self._publish_text(self._name, self._version, text), _ANSWER_S)
        return {}

    def require_changeable_layers(self) -> NoReturn:
        """Refuse every change of registered layers, because a replica that starts later would not have it.

        Raises:
            MethodNotAllowedError: always.
        """
        raise MethodNotAllowedError(
            "layers come from the checkpoint here: replicas come and go, and one registered by a request "
            "would be known to one of them only",
            ("GET", "HEAD", "OPTIONS"),
        )
