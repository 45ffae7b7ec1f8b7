"""The command line: `normload run`."""

import argparse
import asyncio
import math
import signal
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
from normserve.client import DEFAULT_URL, AsyncClient, ClientError, RetryPolicy
from rich.console import Console

from normload import report
from normload.arrivals import ClosedLoop
from normload.records import summarise
from normload.runner import Run, Runner
from normload.workload import DEFAULT_MIX, Workload, parse_mix

_DEFAULT_DURATION_S = 10.0
_SAMPLE = 0.02

WRONG_ANSWERS, NO_ANSWERS, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit code."""
    options = _parser().parse_args(arguments)
    console = report.terminal()
    try:
        return asyncio.run(_run(options, console))
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED
    except ClientError as error:
        console.print(f"{options.url}: {error}", style="red", markup=False)
        return NO_ANSWERS


async def _run(options: argparse.Namespace, console: Console) -> int:
    workload = Workload(options.mix, max_bytes=int(options.max_mib * 2**20), pool=options.pool, seed=options.seed)
    requests, duration_s = options.requests, options.duration
    if requests is None and duration_s is None:
        duration_s = _DEFAULT_DURATION_S
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client) for client in _connect(options)]
        report.show_server(console, options.url, await clients[0].info())
        for request in workload.requests:
            _ = request.tensors
        arrivals = ClosedLoop(requests=requests, duration_s=duration_s)
        # The first Ctrl-C ends the run and shows what there is, a second one ends the program.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, _stop_once, arrivals)
        with report.progress(console, requests=requests, duration_s=duration_s) as note:
            runner = Runner(
                clients,
                workload,
                arrivals,
                check_share=1.0 if options.verify else _SAMPLE,
                seed=options.seed,
                on_record=note,
            )
            run = await runner.run()
    report.show_run(console, run)
    return _exit_code(run)


def _connect(options: argparse.Namespace) -> list[AsyncClient]:
    """A client for each connection: one pool of many would look at all of them for every request."""
    certificates = ssl.create_default_context()
    return [
        AsyncClient(
            options.url,
            api_key=options.api_key,
            timeout_s=options.timeout,
            retries=RetryPolicy(tries=1),
            transport=httpx.AsyncHTTPTransport(verify=certificates),
        )
        for _ in range(options.connections)
    ]


def _stop_once(arrivals: ClosedLoop) -> None:
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    arrivals.stop()


def _exit_code(run: Run) -> int:
    summary = summarise(run.records, run.elapsed_s)
    if summary.wrong:
        return WRONG_ANSWERS
    return NO_ANSWERS if summary.requests == summary.errors.total() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="normload", description="Load tests for normserve.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="send requests on some connections and report rates, latencies and errors",
        description="Send seeded requests, each connection its next one as soon as it has an answer, and"
        " report rates, latencies, errors, and whether the answers were right.",
        epilog=f"Exit code: 0; {WRONG_ANSWERS} when an answer was wrong; {NO_ANSWERS} when none came.",
    )
    add: Callable[..., Any] = run.add_argument
    add("--url", default=DEFAULT_URL, help="where the server listens (%(default)s)")
    add("--connections", type=_count, default=8, metavar="N", help="requests under way at once (%(default)s)")
    length = run.add_mutually_exclusive_group()
    length.add_argument(
        "--duration", type=_amount, metavar="S", help=f"how long, in seconds ({_DEFAULT_DURATION_S:g})"
    )
    length.add_argument("--requests", type=_count, metavar="N", help="how many requests instead")
    add(
        "--seed",
        type=int,
        default=0,
        help="of requests and order (%(default)s)",
    )
    default_mix = ",".join(f"{operation}={weight:g}" for operation, weight in DEFAULT_MIX.items())
    add("--mix", type=_mix, default=default_mix, metavar="OP[=WEIGHT],...", help="operations (%(default)s)")
    add("--max-mib", type=_amount, default=1.0, metavar="MIB", help="the largest x, in MiB (%(default)s)")
    add("--pool", type=_count, default=64, metavar="N", help="how many requests differ (%(default)s)")
    add("--verify", action="store_true", help=f"check every answer, not one in {round(1 / _SAMPLE)}")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--timeout",
        type=_amount,
        default=60.0,
        metavar="S",
        help="longest wait for an answer (%(default)s)",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _mix(text: str) -> dict[str, float]:
    try:
        return parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
