"""The imports and measurements that servers and load tests share: the process that forks them has made them.

Only that process imports this module.
"""

import encodings.idna  # noqa: F401
import gc

# For the processes that are forked.
import normload.clients.client_worker
import normload.clients.oracle  # noqa: F401
import normserve.backends.cpu.backend as cpu_backend
import normserve.cli.commands
import normserve.grpc.gateway
import normserve.http.app
import normserve.process.front_end_server
import normserve.process.owner_server
import normserve.process.supervisor
import normserve.process.worker  # noqa: F401

# FastAPI and uvicorn import these when an application is made and runs.
import pydantic.v1  # noqa: F401
import torch
import uvicorn.lifespan.on
import uvicorn.loops.uvloop  # noqa: F401


def _measure_copy_bandwidth_once() -> None:
    """Give all servers one measurement: 128 MiB of new memory take a third of the time of a start."""
    threads = torch.get_num_threads()
    # Threads of this process would be missing in those that are forked.
    torch.set_num_threads(1)
    bandwidth = cpu_backend._measure_copy_bandwidth()
    torch.set_num_threads(threads)
    cpu_backend._measure_copy_bandwidth = lambda: bandwidth


_measure_copy_bandwidth_once()
# A server collects garbage before it is ready, and need not look through all of this.
gc.freeze()
