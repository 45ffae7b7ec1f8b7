"""A server of a few lines that answers right, wrong, late or not at all, and results made up of numbers."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from fusednorm.reference.float8 import quantise_rows
from normload.adapters.native import join_tensors, split_tensors
from normload.clients import client_processes, oracle
from normload.load.element_types import round_to_tensor
from normload.load.scenarios import LoadPhase
from normload.load.workload import Workload
from normload.measurements import loopback_echo
from normload.measurements.results import PhaseResult, RunResult
from normload.measurements.tallies import PhaseTally, RequestOutcome
from normserve.client import DType, HostTensor
from normserve.codec import safetensors

from tests.integration.harness.preloaded import forking
from tests.service.client.harness.raw_server import RawServer


class FakeServer(ThreadingHTTPServer):
    """Answers every request of a workload as it should be, times `factor`.

    `before` is called with the number of each request; it may wait, or return a status and a problem's code.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.factor = 1.0
        self.before: Callable[[int], tuple[int, str] | None] = lambda _: None
        self.headers = {"Server-Timing": "kernel;dur=2.0", "X-Kernel-Bytes": "1000", "X-Batch-Size": "2"}
        self.requests = 0
        self.statuses: Counter[int] = Counter()
        self.lock = threading.Lock()
        self._cases = {bytes(case.make_tensors()["x"].data): case for case, _ in workload.draw_cases(seed)}
        self._answers: dict[tuple[bytes, float], bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: bytes) -> bytes:
        known = self._answers.get((body, self.factor))
        if known is not None:
            return known
        sent = join_tensors(safetensors.decode(memoryview(body)))
        case = self._cases[bytes(sent["x"].data)]
        tensors = {}
        for name, reference in oracle.compute_expected(case, sent).items():
            dtype = oracle.get_expected_dtype(case, name, sent)
            values = reference.values.detach()
            if dtype is DType.FLOAT8_E4M3FN:
                # Its scale carries the factor.
                y, _ = quantise_rows(values.float())
                tensors[name] = HostTensor(dtype, tuple(y.shape), y.reshape(-1).view(torch.uint8).numpy().data)
            else:
                tensors[name] = round_to_tensor(values.numpy() * self.factor, dtype)
        if case.parts:
            told = {}
            for name, parts in split_tensors(case, tensors).items():
                told |= (
                    {f"{name}.{n}": part for n, part in enumerate(parts)} if type(parts) is list else {name: parts}
                )
            tensors = told
        return self._answers.setdefault((body, self.factor), b"".join(safetensors.encode(tensors)))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_):
        pass

    def do_GET(self):
        info = {"version": "0", "backend": "fake", "device": {"name": "<none>"}}
        self._send(200, json.dumps(info | {"copy_bandwidth_bytes_per_second": 5e9}).encode(), "application/json")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            self.server.requests += 1
            number = self.server.requests
        refused = self.server.before(number)
        if refused is None:
            self._send(200, self.server.answer(body), "application/x-safetensors")
        else:
            status, code = refused
            self._send(status, json.dumps({"code": code}).encode(), "application/problem+json")

    def _send(self, status, body, media_type):
        if self.command == "POST":
            with self.server.lock:
                self.server.statuses[status] += 1
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


#: Small enough to be quick, and with every operation in it.
WORKLOAD = Workload(max_bytes=2**12, pool=12)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked with all imports done; tests/integration/clients/test_normload.py spawns them."""
    for module in (client_processes, loopback_echo):
        monkeypatch.setattr(module, "multiprocessing", SimpleNamespace(get_context=lambda _: forking()))


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer(WORKLOAD)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def raw_server():
    """Starts a server that says on each connection what it is told to, once a request's head has come."""
    servers = []

    def start(*scripts, tls=None):
        servers.append(RawServer(scripts, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def made_result(latencies_s: Sequence[float], *, errors: int = 0, rate: float = 100.0, **changed) -> RunResult:
    """A run of one phase of ten seconds: so many requests, spread evenly, with these latencies."""
    duration_s = 10.0
    tally = PhaseTally(duration_s)
    records = []
    for number, latency_s in enumerate([*latencies_s, *[0.001] * errors]):
        # In the proportion of the golden section, errors and latencies alike come all over the phase.
        due = duration_s * (number * 0.6180339887 % 1)
        code = (200, "ok") if number < len(latencies_s) else (429, "overloaded")
        times = (due, due - 0.01, due, min(due + latency_s, duration_s - 1e-6))
        records.append(RequestOutcome("layer_norm", *times, *code, 1000, 1000, 2000, 1e-6))
    tally.add_records(records)
    phase = LoadPhase("steady", "poisson", duration_s, rate=rate)
    fields = {
        "scenario": "steady",
        "description": "made up",
        "seed": 0,
        "url": "http://127.0.0.1:8000",
        "adapter": "normserve",
        "server": {"version": "0", "device": {"name": "none"}, "copy_bandwidth_bytes_per_second": 5e9},
        "started": "2026-01-01T00:00:00+00:00",
        "processes": 1,
        "connections": 4,
        "cpu": [0.1],
        "machine": None,
        "echo": None,
        "capacity": None,
        "apart": Counter({(200, "ok"): 3}),
        "phases": [PhaseResult(phase, 0.0, duration_s, tally)],
        "checked": 0,
        "wrong": 0,
        "faults": [],
        "remarks": [],
    }
    return RunResult(**fields | changed)


def wait_for(condition: Callable[[], bool], patience_s: float = 10.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)
