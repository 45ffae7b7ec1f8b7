"""Stands for a program that normalises through shared memory: it asks again and again, until it is ended."""

import os
import signal
import time
from contextlib import suppress

import numpy as np
from normserve.client import Client

_ROWS, _COLUMNS = 4096, 1024


def main() -> None:
    """Send LayerNorms of rows, and say how many bytes a second that was."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    weight, bias = np.ones(_COLUMNS, np.float32), np.zeros(_COLUMNS, np.float32)
    with Client(os.environ["NORMALISE_AT"]) as client:
        # In the memory that both share: nothing is copied on its way to the server.
        x = client.empty((_ROWS, _COLUMNS))
        x[:] = np.random.default_rng(0).standard_normal(x.shape, np.float32)
        while True:
            began = time.perf_counter()
            y = client.layer_norm(x, weight, bias).y
            seconds = time.perf_counter() - began
            print(f"{(x.nbytes + y.nbytes) / seconds / 1e9:.1f} GB/s, deviation {float(y.std()):.3f}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
