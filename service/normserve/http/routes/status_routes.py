"""Routes besides the operations: liveness, readiness, metrics, information, and a sample tensor."""

import asyncio
import gzip
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from normserve import __version__
from normserve.codec import npy
from normserve.codec.media_types import NPY, SAFETENSORS
from normserve.engine.engine import Engine
from normserve.engine.progress import StallDetector
from normserve.http.http_exchange import HttpExchange
from normserve.http.routes.format_negotiation import is_preferred
from normserve.jobs.job import Op
from normserve.layers.registry import LayerRegistry
from normserve.memory.tensors import FLOATS, DType, HostTensor
from normserve.metrics.exposition import (
    CONTENT_TYPE,
    OPEN_METRICS,
    OPEN_METRICS_CONTENT_TYPE,
    convert_to_open_metrics,
    strip_exemplars,
)
from normserve.metrics.metrics import Metrics
from normserve.peers.sibling_processes import Question, SiblingProcesses

_READS = ["GET", "HEAD"]
# Higher levels take longer and save little more: 2.7 KB become 2.5 KB.
_GZIP_LEVEL = 1
_SAMPLE_SHAPE = (4, 8)


@dataclass(frozen=True, slots=True)
class StatusRoutes:
    """The handlers of the probes, the metrics, the server's information and the sample tensor.

    Attributes:
        stall_detector: detects that the engine no longer finishes operations.
        limits: the limits in `/v1/info`.
        local_transport_options: the values in `/v1/info` for clients on the same host; None if they cannot share
            memory.
        describe_front_ends: returns the index and process id of each connected front end.
    """

    engine: Engine
    layers: LayerRegistry
    metrics: Metrics
    sibling_processes: SiblingProcesses
    stall_detector: StallDetector
    limits: dict[str, Any]
    local_transport_options: dict[str, Any] | None = None
    describe_front_ends: Callable[[], list[dict[str, int]]] = list

    def make_router(self) -> APIRouter:
        """Make the routes of the probes, the metrics, the server's information and the sample tensor."""
        router = APIRouter(tags=["status"])
        router.add_api_route("/livez", self.show_liveness, methods=_READS)
        router.add_api_route("/readyz", self.show_readiness, methods=_READS)
        router.add_api_route("/metrics", self.show_metrics, methods=_READS)
        router.add_api_route("/v1/info", self.show_info, methods=_READS)
        router.add_api_route("/sample.npy", self.show_sample, methods=_READS)
        return router

    def register_sibling_handlers(self) -> None:
        """Register handlers that send this process's metrics and information to other processes of the fleet."""

        async def metrics(question: Question, at_end: AsyncExitStack) -> bytes:
            return self.metrics.render()

        async def info(question: Question, at_end: AsyncExitStack) -> bytes:
            return json.dumps(self._describe_process()).encode()

        self.sibling_processes.handlers |= {"metrics": metrics, "info": info}

    async def show_liveness(self, request: Request) -> Response:
        """200 while the process works."""
        _label_request(request, "livez")
        return Response("ok\n", media_type="text/plain")

    async def show_readiness(self, request: Request) -> Response:
        """200 once warmed up, while requests are accepted and finished and no signal has come, else 503 with the
        reason.
        """
        _label_request(request, "readyz")
        self.engine.require_available()
        self.stall_detector.require_progress()
        return Response("ready\n", media_type="text/plain")

    async def show_metrics(self, request: Request) -> Response:
        """All metrics, as Prometheus text or OpenMetrics; in a fleet, of all processes."""
        _label_request(request, "metrics")
        text = await self.sibling_processes.render_metrics(self.metrics.render())
        if is_preferred(request.headers.get("accept", ""), OPEN_METRICS, "text/plain"):
            content, content_type = convert_to_open_metrics(text), OPEN_METRICS_CONTENT_TYPE
        else:
            content, content_type = strip_exemplars(text), CONTENT_TYPE
        headers = {"content-type": content_type, "vary": "accept, accept-encoding"}
        if is_preferred(request.headers.get("accept-encoding", ""), "gzip", "identity"):
            # Beside the event loop, which it would delay.
            content = await asyncio.to_thread(gzip.compress, content, _GZIP_LEVEL, mtime=0)
            headers["content-encoding"] = "gzip"
        return Response(content, headers=headers)

    async def show_info(self, request: Request) -> JSONResponse:
        """Versions, backend, device, limits and the measured copy bandwidth."""
        _label_request(request, "info")
        return JSONResponse(await self.describe_server())

    async def describe_server(self) -> dict[str, Any]:
        """Describe the server and its processes, as in `/v1/info`; other transports send the same."""
        device = self.engine.device_description
        processes = await self._describe_processes()
        return {
            "version": __version__,
            "state": self.engine.state.value,
            "backend": self.engine.backend_name,
            "device": {"name": device.name, "kind": device.kind} if device else None,
            "copy_bandwidth_bytes_per_second": device.copy_bandwidth if device else None,
            "versions": dict(device.versions) if device else {},
            "limits": self.limits,
            "layers": len(self.layers),
            "operations": [op.value for op in Op],
            "dtypes": [dtype.value for dtype in FLOATS],
            "media_types": [SAFETENSORS, NPY],
            "local": self._describe_local_transport(),
            **({} if processes is None else {"processes": processes}),
            **({"front_ends": front_ends} if (front_ends := self.describe_front_ends()) else {}),
        }

    def _describe_local_transport(self) -> dict[str, Any] | None:
        """Describe the transport for clients on this host, through shared memory; return None if it is disabled.

        The device's UUID is included if clients may share device memory.
        """
        if self.local_transport_options is None:
            return None
        engine = self.engine
        memory = (
            engine.shareable_device
            if engine.device_description and self.local_transport_options["max_device_bytes"]
            else None
        )
        return {**self.local_transport_options, "device": None if memory is None else memory.uuid}

    async def _describe_processes(self) -> list[dict[str, Any]] | None:
        """Describe every process of the fleet, by its index; return None if there is no fleet to show.

        A process that does not answer is described as gone.
        """
        place = self.sibling_processes.position
        if place is None or not place.is_visible_to_clients:
            return None
        answers = await self.sibling_processes.request_all("info")
        descriptions = {place.index: self._describe_process()} | {
            index: json.loads(answer) for index, answer in answers.items()
        }
        return [descriptions.get(index, {"index": index, "state": "gone"}) for index in range(place.count)]

    def _describe_process(self) -> dict[str, Any]:
        """Describe this process of the fleet: its index, device, process id, restarts and state."""
        place = self.sibling_processes.position
        assert place is not None
        return {
            "index": place.index,
            "device": place.device,
            "pid": os.getpid(),
            "restarts": place.restarts,
            "state": self.engine.state.value,
        }

    async def show_sample(self, request: Request) -> Response:
        """A small npy array, to try the operations with curl alone."""
        _label_request(request, "sample")
        rows, cols = _SAMPLE_SHAPE
        values = memoryview(bytearray(rows * cols * 4)).cast("f")
        for index in range(rows * cols):
            values[index] = float((index * 7) % 11 - 5)
        tensor = HostTensor(DType.FLOAT32, _SAMPLE_SHAPE, values.cast("B"))
        return Response(b"".join(npy.encode(tensor)), media_type=NPY)


def _label_request(request: Request, route: str) -> None:
    exchange: HttpExchange = request.state.exchange
    exchange.record.op = route
