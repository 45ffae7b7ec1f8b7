"""Time whole requests: `python -m benchmarks.serve --out FILE.csv`.

Every server runs at once on one core, if not told otherwise, the C client on another; one connection is kept
alive, npy in and out, LayerNorm of [rows, 1024] float32 with a registered layer.  In each round each server has its
turn, in an order that changes from round to round; ratios are taken within a round, and their median counts.
Answers are compared with torch's before anything is timed.
"""

import argparse
import contextlib
import csv
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np

from benchmarks.serve import servers, system
from benchmarks.serve.posts import COLS, make_parameters, npy, require_right
from benchmarks.serve.servers import Served
from benchmarks.serve.table import OURS, table

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
COLUMNS = (
    *(*system.COLUMNS, "size", "nbytes", "server", "round"),
    *("per_second", "p50_ms", "bytes_per_second", "ours_over_this"),
)

_SOURCES = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve")
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each server at each size")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn")
    parser.add_argument(
        "--cores", nargs=2, default=("0", "1"), help="of the servers and of the client, as in 0-7 8"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both HTTP servers")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(Path(folder), asked.rounds, asked.seconds, *asked.cores, asked.device))
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))


def measure(
    folder: Path, rounds: int, seconds: float, server_cores: str, client_cores: str, device: str = "cpu"
) -> Iterator[dict[str, object]]:
    """Run everything; a row for each server, size and round."""
    client, echo = (_compiled(folder, name) for name in ("client", "echo"))
    random_numbers = np.random.default_rng(0)
    parameters, machine = make_parameters(), system.described()
    cores = system.cores(server_cores)
    backend = "triton" if device == "cuda" else "torch"
    with contextlib.ExitStack() as stack:
        http = [
            *stack.enter_context(servers.normserve(cores, folder, parameters, backend)),
            *stack.enter_context(servers.plain(cores, folder, parameters, device)),
        ]
        for size, nbytes in SIZES.items():
            x = random_numbers.standard_normal((nbytes // 4 // COLS, COLS), dtype=np.float32)
            body = npy(x)
            for server in http:
                _require_right(server, x, body, parameters)
            with servers.echo(cores, echo, len(body)) as echoing:
                for number in range(rounds):
                    turns = [*http, *echoing]
                    random.Random(number).shuffle(turns)
                    timed = {turn.name: _turn(client, client_cores, turn, folder, body, seconds) for turn in turns}
                    for name, (per_second, p50) in timed.items():
                        yield machine | {
                            "size": size,
                            "nbytes": len(body),
                            "server": name,
                            "round": number,
                            "per_second": f"{per_second:.2f}",
                            "p50_ms": f"{p50 * 1000:.4f}",
                            "bytes_per_second": f"{2 * len(body) * per_second:.0f}",
                            "ours_over_this": f"{timed[OURS][0] / per_second:.3f}",
                        }
            print(f"{size}: done", flush=True)


def _turn(
    client: Path, cores: str, server: Served, folder: Path, body: bytes, seconds: float
) -> tuple[float, float]:
    """Answers a second, and the median time of one."""
    request = folder / "request"
    head = f"POST {server.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/x-npy\r\n"
    request.write_bytes((f"{head}Content-Length: {len(body)}\r\n\r\n".encode() if server.path else b"") + body)
    command = [str(client), "http" if server.path else "raw", server.address, str(request), str(seconds)]
    said = subprocess.run(["taskset", "-c", cores, *command], capture_output=True, text=True, check=True)
    count, elapsed, p50 = map(float, said.stdout.split())
    return count / elapsed, p50


def _require_right(server: Served, x: np.ndarray, body: bytes, parameters: Mapping[str, np.ndarray]) -> None:
    """Compare one answer with torch's."""
    is_port = server.address.isdigit()
    transport = httpx.HTTPTransport(uds=None if is_port else server.address)
    url = f"http://127.0.0.1:{server.address}" if is_port else "http://localhost"
    with httpx.Client(base_url=url, transport=transport, timeout=60) as http:
        answer = http.post(server.path, content=body, headers={"content-type": "application/x-npy"})
    answer.raise_for_status()
    require_right(x, parameters, answer.content)


def _compiled(folder: Path, name: str) -> Path:
    program = folder / name
    subprocess.run(["gcc", "-O2", "-Wall", "-o", str(program), str(_SOURCES / f"{name}.c")], check=True)
    return program


if __name__ == "__main__":
    main()
