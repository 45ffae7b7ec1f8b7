"""Measures what prepared calls take, by malloc's own count; prints a JSON object of name to [measured, estimated].

usage: PYTHONMALLOC=malloc python -m tests.service.requests.prepared_bytes
"""

import ctypes
import gc
import io
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np
from normserve.admission.client_identity import ClientIdentity
from normserve.backends.cpu.backend import get_or_prepare_job
from normserve.codec import local_messages as frames
from normserve.codec import safetensors
from normserve.http.middleware.origin_policy import OriginPolicy
from normserve.http.oip.inference_routes import InferenceRoutes
from normserve.http.oip.models import OPERATIONS
from normserve.http.relay import relay_messages
from normserve.http.relay.relay_server import RelayServer
from normserve.http.relay.relayed_operations import OperationDispatcher, OperationServices
from normserve.http.routes.operation_routes import OperationEndpoint
from normserve.jobs.job import Op, PassDirection
from normserve.local.operation_planner import OperationPlanner
from normserve.local.segment_table import SegmentTable
from normserve.local.server_connection import LocalServerConnection
from normserve.memory.host_segments import HostSegment, make_segment
from normserve.metrics.metrics import Metrics
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.prepared_calls import PreparedCallCache

from tests.service.jobs.fake_jobs import tensor

WARM_CALLS, MEASURED_CALLS = 4, 20
CALLS = range(WARM_CALLS + MEASURED_CALLS)

METRICS = Metrics()

Call = Callable[[int], object]


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names_ = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names_.split()]


def prepared_calls() -> PreparedCallCache:
    return PreparedCallCache(2**40, METRICS.get_prepared_call_counters("process"))


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def http(prepared: PreparedCallCache) -> dict[str, Call]:
    operation = OperationEndpoint(None, None, prepared, Op.LAYER_NORM, PassDirection.FORWARD)
    sender = SimpleNamespace(client_identity=ClientIdentity("here"), charge_body_copy=lambda nbytes: None)
    ranges = ",".join(chr(97 + number % 26) + chr(97 + number // 26) for number in range(400)).encode()
    head = operation.prepare_head(b"", {}, "here")

    def payload(body: bytes) -> None:
        operation.make_job(head, memoryview(bytearray(body)), None, sender)

    # Made before, because the codec remembers some headers that it has written.
    arrays = [saved(np.zeros((1, 5000 + number), np.float32)) for number in CALLS]
    several = [
        b"".join(safetensors.encode({f"x.{each}": tensor(1, 5000 + number) for each in range(8)}))
        for number in CALLS
    ]
    return {
        "head": lambda number: operation.prepare_head(b"eps=%d" % (5000 + number), {}, "here"),
        "accepted": lambda number: operation.prepare_head(b"", {b"accept": b"%b,%d" % (ranges, number)}, "here"),
        "npy": lambda number: payload(arrays[number]),
        "several": lambda number: payload(several[number]),
    }


def relayed(prepared: PreparedCallCache) -> dict[str, Call]:
    operation = OperationEndpoint(None, None, prepared_calls(), Op.LAYER_NORM, PassDirection.FORWARD)
    relays = RelayServer(None, None, METRICS, prepared)
    relays.set_application(
        None, OperationDispatcher(OperationServices({"/v1/layer_norm": operation}, OriginPolicy(None), None, None))
    )

    def relay(number: int, fields: int) -> None:
        headers = [(b"x-number", b"%d" % number), *[(b"h%d" % each, b"%d" % each) for each in range(fields)]]
        path = "/v1/layer_norm"
        head = relay_messages.RequestHead(
            "POST", path, path.encode(), b"", headers, "1.1", "http", ("localhost", 80)
        )
        relays._prepare_scope(
            relay_messages.RequestStarted(1, relay_messages.encode(head), ("127.0.0.1", 1), 0, None, 0.0, "")
        )

    return {
        "relayed": lambda number: relay(number, 3),
        "relayed, many fields": lambda number: relay(number, 300),
    }


def json_headers(prepared: PreparedCallCache) -> dict[str, Call]:
    infer = InferenceRoutes(None, None, None, None, None, prepared)

    def read(number: int, inputs: int, outputs: int) -> None:
        of_each = {"shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}
        document = {
            "id": f"{number}",
            "inputs": [{"name": f"x.{each}", **of_each} for each in range(inputs)],
            "outputs": [{"name": f"y.{each}"} for each in range(outputs)],
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        body = memoryview(text + bytes(4 * inputs))
        infer._find_or_parse_request(OPERATIONS["layer_norm"], None, len(text), body, "here")

    return {
        "json": lambda number: read(number, 1, 1),
        "json, many inputs": lambda number: read(number, 30, 0),
        "json, many outputs": lambda number: read(number, 1, 60),
    }


def local(prepared: PreparedCallCache) -> dict[str, Call]:
    _, segment = make_segment(2**20, HostSegment)
    arena = SegmentTable()
    at = arena.add_segment(memoryview(segment))
    engine = SimpleNamespace(require_ready=lambda: None, is_better_unbatched=lambda job: True)
    operations = OperationPlanner(engine, None)
    connection = SimpleNamespace(_prepared_calls=prepared)

    def compute(
        number: int, op: str, query: str, tensors: dict[str, tuple[int, ...]], results: int
    ) -> frames.ComputeMessage:
        located = {
            name: frames.TensorReference(at, 2**10 * number, "float32", shape) for name, shape in tensors.items()
        }
        names = ("y", "residual_out", "mean", "rstd")[:results]
        places = {name: frames.SegmentRange(at, 2**19 + 2**10 * place, 2**10) for place, name in enumerate(names)}
        return frames.ComputeMessage(op, located, places, query=query)

    def frame(message: frames.ComputeMessage | list[frames.ComputeMessage]) -> None:
        for request in LocalServerConnection._parse_frame(connection, msgspec.json.encode(message)):
            plan, layer = operations.plan_request(request, arena, prepared, RequestRecord())
            job = plan.make_job(layer)
            of_backend = get_or_prepare_job(job)
            assert of_backend is not None
            of_backend.run()

    x = {"x": (1, 64)}
    chain = x | {f"{name}.{norm}": (64,) for norm in range(8) for name in ("weight", "bias")}
    group = dict.fromkeys(("x", "residual"), (1, 4, 2, 2)) | dict.fromkeys(("weight", "bias"), (4,))
    return {
        "frame": lambda number: frame(compute(number, "layer_norm", "", x, 1)),
        "frame of a chain": lambda number: frame(compute(number, "layer_norm_chain", "", chain, 1)),
        "frame of a group norm": lambda number: frame(
            compute(number, "group_norm", "num_groups=2&stats=1", group, 4)
        ),
        "frame of many": lambda number: frame([compute(number, "layer_norm", "", x, 1)] * 16),
    }


def allocated_bytes(mallinfo: Callable[[], Mallinfo]) -> int:
    gc.collect()
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def main() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    measured = {}
    for owner in (http, relayed, json_headers, local):
        prepared = prepared_calls()
        for name, call in owner(prepared).items():
            # What the first calls make for all later ones is not theirs.
            for number in CALLS[:WARM_CALLS]:
                call(number)
            before, estimated_before = allocated_bytes(mallinfo), prepared.nbytes
            for number in CALLS[WARM_CALLS:]:
                call(number)
            estimated = prepared.nbytes - estimated_before
            measured[name] = [allocated_bytes(mallinfo) - before, estimated]
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
