"""`POST /v1/{op}` and `POST /v1/{op}/backward`."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from normserve.codec import npy, safetensors
from normserve.codec.media_types import NPY, SAFETENSORS
from normserve.engine import Engine
from normserve.errors import NotAcceptableError
from normserve.exchange import Exchange
from normserve.jobs import NormJob, NormResult, Op, Pass
from normserve.layers import LayerRegistry
from normserve.routes.body import BodyReader
from normserve.routes.negotiation import Accepted, declared_format, sniffed_format
from normserve.routes.parameters import (
    Parameter,
    describe,
    make_spec,
    operation_parameters,
    parse_query,
)
from normserve.routes.responses import BuffersResponse
from normserve.tensors import DType, HostTensor
from normserve.validation import make_job


@dataclass(frozen=True, slots=True)
class Operations:
    """What the operations' handlers work with."""

    engine: Engine
    layers: LayerRegistry
    bodies: BodyReader
    timeout_ms: float

    def router(self) -> APIRouter:
        """Every operation in both directions."""
        router = APIRouter(tags=["operations"])
        for op in Op:
            for direction in Pass:
                path = f"/v1/{op.value}" + ("" if direction is Pass.FORWARD else "/backward")
                parameters = operation_parameters(op, direction)
                router.add_api_route(
                    path,
                    _Handler(self, op, direction, parameters).handle,
                    methods=["POST"],
                    name=f"{op.value} {direction.value}",
                    summary=f"{op.value}, {direction.value}",
                    openapi_extra=_description(parameters),
                )
        return router


@dataclass(frozen=True, slots=True)
class _Handler:
    """One operation in one direction."""

    service: Operations
    op: Op
    direction: Pass
    parameters: tuple[Parameter, ...]

    async def handle(self, request: Request) -> BuffersResponse:
        exchange: Exchange = request.state.exchange
        record = exchange.record
        record.op, record.direction = self.op.value, self.direction.value
        values = parse_query(request.scope["query_string"], self.parameters)
        spec = make_spec(self.op, self.direction, values)
        headers = request.headers
        body_format = declared_format(headers.get("content-type", ""), headers.get("content-encoding", ""))
        accepted = Accepted(headers.get("accept", ""))
        self.service.engine.require_ready()
        layer = self.service.layers.get(values["layer"]) if "layer" in values else None

        body = await self.service.bodies.read(request)
        parsing = time.perf_counter()
        record.stages["recv"] = parsing - record.began
        record.waiting_in = "parse"
        body_format = body_format or sniffed_format(body)
        answer_format = accepted.choose(body_format)
        job = make_job(spec, _decode(body_format, body), layer)
        record.dtype = job.x.dtype.value
        _require_expressible(answer_format, job)
        record.stages["parse"] = time.perf_counter() - parsing

        record.waiting_in = "queue"
        deadline = record.began + values.get("timeout_ms", self.service.timeout_ms) / 1000
        result = await self._run(request, job, deadline)
        return _answer(exchange, answer_format, result)

    async def _run(self, request: Request, job: NormJob, deadline: float) -> NormResult:
        """Compute, unless the client leaves first."""
        engine = self.service.engine
        watch = asyncio.create_task(_disconnection(request))
        watch.add_done_callback(lambda task: None if task.cancelled() else engine.abandon(job))
        try:
            return await engine.submit(job, deadline)
        finally:
            watch.cancel()


async def _disconnection(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _decode(body_format: str, body: memoryview) -> Mapping[str, HostTensor]:
    return {"x": npy.decode(body)} if body_format == NPY else safetensors.decode(body)


def _require_expressible(answer_format: str, job: NormJob) -> None:
    """Say before the work, not after it, that the answer cannot be written down."""
    dtype = job.spec.out_dtype or job.x.dtype
    if answer_format == NPY and dtype is DType.BFLOAT16:
        raise NotAcceptableError(
            f"npy has no bfloat16: accept {SAFETENSORS}, or ask for out_dtype float32 or float16"
        )


def _answer(exchange: Exchange, answer_format: str, result: NormResult) -> BuffersResponse:
    record = exchange.record
    began = time.perf_counter()
    if answer_format == NPY:
        buffers = npy.encode(result.tensors["y" if "y" in result.tensors else "dx"])
    else:
        buffers = safetensors.encode(result.tensors)
    record.stages |= {
        "queue": result.queue_s,
        "copy_in": result.copy_in_s,
        "kernel": result.kernel_s,
        "copy_out": result.copy_out_s,
    }
    timing = ", ".join(
        f"{stage};dur={record.stages[stage] * 1000:.9f}"
        for stage in ("recv", "queue", "copy_in", "kernel", "copy_out")
    )
    headers = [
        ("server-timing", timing),
        ("x-kernel-bytes", str(result.kernel_bytes)),
        ("x-kernel-bandwidth", f"{result.kernel_bandwidth:.0f}"),
        ("x-batch-size", str(result.batch_size)),
    ]
    response = BuffersResponse(buffers, answer_format, headers)
    record.stages["serialize"] = time.perf_counter() - began
    record.waiting_in = "send"
    return response


def _description(parameters: tuple[Parameter, ...]) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    content = {SAFETENSORS: binary, NPY: binary}
    return {
        "parameters": describe(parameters),
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The result.", "content": content}},
    }
