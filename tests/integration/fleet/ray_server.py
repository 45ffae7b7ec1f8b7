"""normserve on a Ray of its own, on this machine: `python ray_server.py REPLICAS`; SIGUSR1 leaves one of them."""

import queue
import signal
import sys

import ray
from normserve.peers.replica_siblings import ReplicaScaling
from normserve.process.ray import build
from ray import serve

PORT = 8100


def main() -> None:
    """Serve until told to stop."""
    replicas = int(sys.argv[1])
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: told.put(number))
    ray.init(address="local", num_cpus=2 * replicas, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    deploy(replicas)
    print(f"ready on http://127.0.0.1:{PORT}", flush=True)
    while told.get() != signal.SIGTERM:
        deploy(1)
    serve.shutdown()
    ray.shutdown()


def deploy(replicas: int) -> None:
    """Have so many."""
    serve.run(
        build(ReplicaScaling(min_replicas=replicas, max_replicas=replicas)), name="normserve", route_prefix="/"
    )


if __name__ == "__main__":
    main()
