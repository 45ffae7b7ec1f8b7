"""The Open Inference Protocol against NVIDIA Triton and `/v1`: `python -m benchmarks.serve.protocols.oip`.

LayerNorm of [rows, 1024] float32 with parameters that the server holds, over one connection that is kept alive:
whole calls of tritonclient, arrays in and out, and the C client with the same bytes, so that the client is not part
of the measurement; both also with x and y in system shared memory, where x is already; tritonclient over gRPC, both
ways, and with a server in Python that only returns x; the C client on /v1, with npy.  By default servers are on one
core and the clients on another.  In each round each caller has a turn, in an order that changes from round to
round, while the other server is stopped; ratios are computed within a round, and their median is the result.
Responses are compared with torch's before anything is timed.  Triton is skipped unless `--python` names an
interpreter that has pytriton.
"""

import argparse
import contextlib
import functools
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from benchmarks.harness.csv_results import CsvResults, compute_column_median
from benchmarks.peers.peer_servers import OTHERS, RunningServer, run_peer
from benchmarks.serve import command
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.clients.c_client import CompiledClient
from benchmarks.serve.clients.shared_memory_calls import PREFIX, register_regions
from benchmarks.serve.command import SIZES
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.server_processes import TUNED_MALLOC, ServerProcess, run_process

OURS, OURS_IN_C, V1_IN_C = "normserve, tritonclient", "normserve, C client", "normserve /v1, C client"
TRITON, TRITON_IN_C = "Triton, tritonclient", "Triton, C client"
OURS_SHARED, OURS_SHARED_IN_C = "normserve, shared memory", "normserve, shared memory, C client"
TRITON_SHARED, TRITON_SHARED_IN_C = "Triton, shared memory", "Triton, shared memory, C client"
OURS_GRPC, OURS_GRPC_SHARED = "normserve, gRPC", "normserve, gRPC, shared memory"
TRITON_GRPC, TRITON_GRPC_SHARED = "Triton, gRPC", "Triton, gRPC, shared memory"
GRPC_ECHO = "gRPC alone"
COLUMNS = ("size", "nbytes", "caller", "round", "per_second", "p50_ms", "over_v1", "ours_over_triton")

Turn = Callable[[float], tuple[float, float]]

_JSON = "application/json"
_LENGTH = "Inference-Header-Content-Length"
_PEERS = {
    OURS: TRITON,
    OURS_IN_C: TRITON_IN_C,
    OURS_SHARED: TRITON_SHARED,
    OURS_SHARED_IN_C: TRITON_SHARED_IN_C,
    OURS_GRPC: TRITON_GRPC,
    OURS_GRPC_SHARED: TRITON_GRPC_SHARED,
}
_SHARED = {OURS: (OURS_SHARED, OURS_SHARED_IN_C), TRITON: (TRITON_SHARED, TRITON_SHARED_IN_C)}


@dataclass(frozen=True, slots=True)
class TimedCaller:
    """A caller that has turns.

    Attributes:
        turn: calls for some seconds; returns calls per second, and the median time of a call in seconds.
        is_theirs: whether it calls Triton.
    """

    turn: Turn
    is_theirs: bool = False


def main() -> int:
    options = command.make_parser("the servers and of the clients")
    command.add_size_option(options)
    command.add_turn_options(options, "each caller", 1.0)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both servers")
    options.add_argument("--python", help="the interpreter of an environment with pytriton")
    options.add_argument("--protocol", choices=("http", "grpc"), help="of tritonclient; both if not given")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each size, caller and round."""
    server_cores, client_cores = asked.cores
    parameters = checked_requests.make_parameters()
    backend = "triton" if asked.device == "cuda" else "torch"
    our_port, their_port, echo_port = (str(find_free_port()) for _ in range(3))
    with contextlib.ExitStack() as stack:
        options = ["--oip-shared-memory", PREFIX, "--grpc-port", our_port]
        (ours, _) = stack.enter_context(
            server_processes.run_normserve(server_cores, folder, parameters, backend, options)
        )
        theirs = stack.enter_context(_start_triton(asked, folder, server_cores, parameters, their_port))
        models = {our_port: server_processes.LAYER} | ({their_port: "layer_norm"} if theirs is not None else {})
        if asked.protocol != "http":
            stack.enter_context(_start_echo(server_cores, echo_port))
        os.sched_setaffinity(0, client_cores)
        for size in asked.size or SIZES:
            with results.run_part(size), contextlib.ExitStack() as connected:
                x = checked_requests.make_x(SIZES[size])
                right = checked_requests.compute_expected(x, parameters).float().numpy()
                loop = CompiledClient(folder, client_cores)
                callers: dict[str, TimedCaller] = {}
                if asked.protocol != "grpc":
                    callers |= _iterate_callers(connected, loop, ours, theirs, x, right)
                if asked.protocol != "http":
                    for port, model in models.items():
                        is_theirs = port == their_port
                        callers |= _iterate_grpc_callers(connected, model, port, x, right, is_theirs=is_theirs)
                    echo = connected.enter_context(triton_grpc.InferenceServerClient(f"127.0.0.1:{echo_port}"))
                    callers[GRPC_ECHO] = TimedCaller(
                        _make_turn(functools.partial(_call_infer, echo, "", x, triton_grpc))
                    )
                callers[V1_IN_C] = TimedCaller(
                    _make_c_turn(loop, ours, "application/x-npy", checked_requests.encode_npy(x), {})
                )
                _time_callers(results, size, x, callers, theirs, asked)


@contextlib.contextmanager
def _start_echo(cores: set[int], port: str) -> Iterator[None]:
    """The server that returns what it receives."""
    command = [sys.executable, "-m", "benchmarks.serve.protocols.grpc_echo", port]
    with run_process(command, cores, TUNED_MALLOC) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield


@contextlib.contextmanager
def _start_triton(
    asked: argparse.Namespace, folder: Path, cores: set[int], parameters: Mapping[str, np.ndarray], grpc_port: str
) -> Iterator[RunningServer | None]:
    """NVIDIA Triton Inference Server; None without an interpreter that has it."""
    if asked.python is None:
        print("NVIDIA Triton is left out: no --python", flush=True)
        yield None
        return
    file = folder / "triton.npz"
    np.savez(file, weight=parameters["weight"], bias=parameters["bias"])
    with run_peer(OTHERS["nvidia-triton"], asked.python, cores, file, asked.device, grpc_port) as running:
        yield running


def _iterate_callers(
    stack: contextlib.ExitStack,
    loop: CompiledClient,
    ours: ServerProcess,
    theirs: RunningServer | None,
    x: np.ndarray,
    right: np.ndarray,
) -> Iterator[tuple[str, TimedCaller]]:
    body, length = triton.InferenceServerClient.generate_request_body([_make_input(x)])
    places = [(OURS, OURS_IN_C, replace(ours, path=f"/v2/models/{server_processes.LAYER}/infer"))]
    if theirs is not None:
        url = httpx.URL(theirs.target.url)
        places.append(
            (TRITON, TRITON_IN_C, ServerProcess("triton", str(url.port), f"{url.path}/infer", theirs.pid))
        )
    for in_python, in_c, place in places:
        client = stack.enter_context(triton.InferenceServerClient(f"127.0.0.1:{place.address}"))
        model = place.path.split("/")[3]
        np.testing.assert_allclose(_call_infer(client, model, x), right, rtol=1e-5, atol=3e-5)
        is_theirs = place.name == "triton"
        yield in_python, TimedCaller(_make_turn(functools.partial(_call_infer, client, model, x)), is_theirs)
        yield (
            in_c,
            TimedCaller(_make_c_turn(loop, place, "application/octet-stream", body, {_LENGTH: length}), is_theirs),
        )
        shared = stack.enter_context(register_regions(triton, client, place.name, model, x))
        np.testing.assert_allclose(shared(), right, rtol=1e-5, atol=3e-5)
        for name, turn in zip(
            _SHARED[in_python],
            (_make_turn(shared), _make_c_turn(loop, place, _JSON, shared.make_body(), {})),
            strict=True,
        ):
            yield name, TimedCaller(turn, is_theirs)


def _iterate_grpc_callers(
    stack: contextlib.ExitStack, model: str, port: str, x: np.ndarray, right: np.ndarray, *, is_theirs: bool
) -> Iterator[tuple[str, TimedCaller]]:
    """tritonclient over gRPC, with tensors in messages and in regions."""
    names = (TRITON_GRPC, TRITON_GRPC_SHARED) if is_theirs else (OURS_GRPC, OURS_GRPC_SHARED)
    client = stack.enter_context(triton_grpc.InferenceServerClient(f"127.0.0.1:{port}"))
    call: Callable[[], np.ndarray] = functools.partial(_call_infer, client, model, x, triton_grpc)
    shared = stack.enter_context(register_regions(triton_grpc, client, f"grpc-{is_theirs}", model, x))
    calls: tuple[Callable[[], np.ndarray], ...] = (call, shared)
    for name, each in zip(names, calls, strict=True):
        np.testing.assert_allclose(each(), right, rtol=1e-5, atol=3e-5)
        yield name, TimedCaller(_make_turn(each), is_theirs)


def _make_input(x: np.ndarray, protocol: ModuleType = triton) -> Any:
    return protocol.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)


def _call_infer(client: Any, model: str, x: np.ndarray, protocol: ModuleType = triton) -> np.ndarray:
    y: np.ndarray = client.infer(model, [_make_input(x, protocol)]).as_numpy("y")
    return y


def find_free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _make_turn(call: Callable[[], object]) -> Turn:
    def run_turn(seconds: float) -> tuple[float, float]:
        taken: list[float] = []
        while len(taken) < 3 or sum(taken) < seconds:
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return len(taken) / sum(taken), median(taken)

    return run_turn


def _make_c_turn(
    loop: CompiledClient, place: ServerProcess, content_type: str, body: bytes, fields: Mapping[str, object]
) -> Turn:
    def run_turn(seconds: float) -> tuple[float, float]:
        came = loop.run_turn(place, content_type, body, seconds, fields=fields)
        return came.per_second, came.p50_s

    return run_turn


def _time_callers(
    results: CsvResults,
    size: str,
    x: np.ndarray,
    callers: Mapping[str, TimedCaller],
    theirs: RunningServer | None,
    asked: argparse.Namespace,
) -> None:
    for number in range(asked.rounds):
        came: dict[str, tuple[float, float]] = {}
        for name in random.Random(number).sample(list(callers), len(callers)):
            caller = callers[name]
            with _suspend(None if caller.is_theirs else theirs):
                caller.turn(asked.seconds / 5)
                came[name] = caller.turn(asked.seconds)
        for name, (per_second, p50_s) in came.items():
            peer = _PEERS.get(name)
            results.add_row(
                {
                    "size": size,
                    "nbytes": x.nbytes,
                    "caller": name,
                    "round": number,
                    "per_second": f"{per_second:.5g}",
                    "p50_ms": f"{1000 * p50_s:.4g}",
                    "over_v1": f"{per_second / came[V1_IN_C][0]:.4g}",
                    "ours_over_triton": f"{per_second / came[peer][0]:.4g}" if peer in came else "",
                }
            )


@contextlib.contextmanager
def _suspend(server: RunningServer | None) -> Iterator[None]:
    """Stop another server, which would poll on the same core while idle."""
    if server is None:
        yield
        return
    server.suspend()
    try:
        yield
    finally:
        server.resume()


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each size and caller: medians of calls per second and of the ratios."""
    lines = ["| size | caller | calls a second | over /v1 in C | over Triton's |", "|---|---|---|---|---|"]
    for size, caller in dict.fromkeys((str(row["size"]), str(row["caller"])) for row in rows):
        of = [row for row in rows if (row["size"], row["caller"]) == (size, caller)]
        over = f"{compute_column_median(of, 'ours_over_triton'):.2f}" if of[0]["ours_over_triton"] else "-"
        lines.append(
            f"| {size} | {caller} | {compute_column_median(of, 'per_second'):.4g} | "
            f"{compute_column_median(of, 'over_v1'):.3f} | {over} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
