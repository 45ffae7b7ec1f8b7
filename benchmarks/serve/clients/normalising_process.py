"""A process that normalises: `python -m benchmarks.serve.clients.normalising_process WHERE BYTES CORES`.

WHERE is the URL of a server that shares memory, with #device for a GPU's memory, or "own cpu" or "own cuda" to use
its own kernels.  It prints the time of its first result, by `time.perf_counter`; then, for each line of input with
the time until which to work, the calls that ended meanwhile.  It imports torch only if necessary, because a server
also saves that import.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

_COLS = 1024

Call = Callable[[], Any]


def main() -> None:
    where, nbytes, cores = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    x = np.random.default_rng(0).standard_normal((int(nbytes) // 4 // _COLS, _COLS), np.float32)
    with _open_caller(where, x) as call:
        y = call()
        answered = time.perf_counter()
        _check_result(x, np.asarray(y.cpu() if hasattr(y, "cpu") else y))
        print(json.dumps(answered), flush=True)
        for line in sys.stdin:
            print(json.dumps(call_until(json.loads(line), call)), flush=True)


def call_until(until: float, call: Call) -> Mapping[str, Any]:
    """Call in a loop; return the end and the seconds of each call, and the number of errors."""
    calls: list[tuple[float, float]] = []
    errors = 0
    ended = time.perf_counter()
    while ended < until:
        begun = time.perf_counter()
        try:
            call()
        except Exception:
            errors += 1
        ended = time.perf_counter()
        calls.append((ended, ended - begun))
    return {"calls": calls, "errors": errors}


def _check_result(x: np.ndarray, y: np.ndarray) -> None:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(1, keepdims=True)
    right = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=3e-5)


@contextlib.contextmanager
def _open_caller(where: str, x: np.ndarray) -> Iterator[Call]:
    """A function that normalises x, with or without a server."""
    if where == "own cpu":
        yield _make_torch_call(x)
        return
    if where == "own cuda":
        yield _make_kernel_call(x)
        return
    from normserve.client import Client, RetryPolicy

    url, _, is_on_device = where.partition("#")
    with Client(url, retries=RetryPolicy(tries=1)) as client:
        if is_on_device:
            import torch

            there = client.empty(x.shape, torch.float32, device="cuda")
            there.copy_(torch.from_numpy(x))
            yield lambda: client.layer_norm(there, eps=1e-5).y
        else:
            shared = client.empty(x.shape)
            shared[:] = x
            yield lambda: client.layer_norm(shared, eps=1e-5).y


def _make_torch_call(x: np.ndarray) -> Call:
    import torch

    torch.set_num_threads(1)
    tensor = torch.from_numpy(x)
    return lambda: torch.nn.functional.layer_norm(tensor, (_COLS,))


def _make_kernel_call(x: np.ndarray) -> Call:
    import fusednorm
    import torch

    tensor = torch.from_numpy(x).cuda()

    def call() -> Any:
        y = fusednorm.layer_norm(tensor)
        torch.cuda.synchronize()
        return y

    return call


if __name__ == "__main__":
    main()
