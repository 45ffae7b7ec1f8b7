"""Compile the kernels of a server's warm-up in advance, without a GPU: `python -m fusednorm.warm --arch 80,90`.

Kernels are written to Triton's cache, TRITON_CACHE_DIR, where a process on such a GPU finds them; kernels that are
in the cache already are kept.  With TRITON_STORE_BINARY_ONLY=1, files that only people read are omitted.  The exit
code is 1 if a kernel was not compiled.
"""

import argparse
import fcntl
import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager, triton_key

from fusednorm.devices.device_properties import INTERPRETED, GpuModel
from fusednorm.devices.gpu_models import GPUS, select_gpu_models
from fusednorm.launch.launches import Launch
from fusednorm.warm.absent_driver import AbsentDriver, build_launcher
from fusednorm.warm.compile_records import is_compiled, prepare_lock_path, record_compiled
from fusednorm.warm.compile_workers import TicketResult, run_tickets
from fusednorm.warm.warm_calls import compile_kernel, list_warm_launches

DEFAULT_LENGTHS = "1024"
"""The row lengths that a server uses by default."""

Part = tuple[int, int]
"""The index of a GPU, and a row length."""


def main(arguments: list[str] | None = None, hashing: threading.Thread | None = None) -> int:
    """Compile the kernels that the command line asks for; return 1 if a kernel could not be compiled, else 0.

    Args:
        hashing: a thread that already runs `triton_key`, if any.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("kernels are compiled, so TRITON_INTERPRET must be unset")
    archs = options.arch
    gpus = select_gpu_models(frozenset(archs))
    if options.multiprocessors is not None:
        gpus = tuple(GpuModel("", divmod(arch, 10), options.multiprocessors) for arch in archs)
    for arch in archs:
        if all(gpu.arch != arch for gpu in gpus):
            known_archs = ", ".join(map(str, sorted({gpu.arch for gpu in GPUS})))
            parser.error(f"no GPU of architecture {arch} is known, but of {known_archs}: give --multiprocessors")
    began = time.perf_counter()
    if hashing is None:
        # It reads all of Triton's files, with Python's lock released.
        hashing = threading.Thread(target=triton_key)
        hashing.start()
    try:
        lock_file = prepare_lock_path().open("w")
    except OSError as error:
        parser.error(f"Triton's cache cannot be written to: {error}")
    with lock_file as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        warming = CacheWarmer(gpus, options.lengths, options.only_warm_up)
        # No other thread may run during a fork.
        hashing.join()
        missing = warming.compile(options.jobs, options.until_gone)
    print(f"{time.perf_counter() - began:.1f} s in all", flush=True)
    return 1 if missing else 0


class CacheWarmer:
    """Kernels to compile into Triton's cache, for the given GPUs and row lengths.

    The constructor plans their launches, and replaces Triton's driver.
    """

    def __init__(self, gpus: Sequence[GpuModel], lengths: Sequence[int], only_warm_up: bool) -> None:
        self._gpus = gpus
        self._only_warm_up = only_warm_up
        self._parts: dict[Part, list[int]] = {}
        self._tickets: list[tuple[int, Launch]] = []
        for place, length in product(range(len(gpus)), lengths):
            gpu = gpus[place]
            if not is_compiled(gpu.arch, gpu.multiprocessors, length, only_warm_up):
                first = len(self._tickets)
                self._tickets += [(place, launch) for launch in list_warm_launches(gpu, length, only_warm_up)]
                self._parts[place, length] = list(range(first, len(self._tickets)))
        self._driver = AbsentDriver(gpus)
        driver.set_active(self._driver)

    def compile(self, jobs: int, until_gone: int | None) -> int:
        """Compile the kernels in `jobs` processes and print the results; return the number of missing kernels.

        Args:
            until_gone: the id of a process; compilation stops when that process has ended.
        """
        done: dict[int, TicketResult] = {}
        for each in run_tickets(
            range(len(self._tickets)), self._compile_ticket, jobs, lambda: _is_running(until_gone)
        ):
            done[each.ticket] = each
            self._print_result(each)
        missing = 0
        for (place, length), tickets in self._parts.items():
            gpu = self._gpus[place]
            lost = sum(ticket not in done or done[ticket].nbytes < 0 for ticket in tickets)
            missing += lost
            if not lost:
                record_compiled(gpu.arch, gpu.multiprocessors, length, self._only_warm_up)
        made = [each for each in done.values() if each.nbytes >= 0 and not each.was_cached]
        nbytes = sum(each.nbytes for each in made)
        seconds = sum(each.seconds for each in made)
        print(f"{len(made)} kernels compiled, {nbytes / 1e6:.1f} MB, {seconds:.1f} s of a core; {missing} missing")
        return missing

    def _compile_ticket(self, ticket: int) -> tuple[int, bool]:
        """Compile the kernel of the launch with index `ticket`, in a worker process.

        Return the kernel's bytes in the cache, and whether it was there before.
        """
        self._driver.current, launch = self._tickets[ticket]
        hits: list[bool] = []
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        compiled = compile_kernel(launch)
        # Two GPUs of an architecture, or two lengths, may have the same kernel: a process then has it in memory.
        was_there = not hits or hits[0]
        build_launcher(compiled)
        return _count_kernel_bytes(compiled.hash), was_there

    def _print_result(self, done: TicketResult) -> None:
        place, launch = self._tickets[done.ticket]
        became = "failed" if done.nbytes < 0 else "there" if done.was_cached else f"{done.nbytes / 1e3:.0f} kB"
        print(f"sm_{self._gpus[place].arch} {launch.kernel.__name__} {done.seconds:.2f} s {became}", flush=True)


def _count_kernel_bytes(key: str) -> int:
    """Return the number of bytes of a compiled kernel in the cache."""
    folder = get_cache_manager(key).cache_dir
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())


def _is_running(process: int | None) -> bool:
    """Return whether the process with this id still runs; always true for None."""
    return process is None or Path(f"/proc/{process}").exists()


def _parse_sizes(text: str) -> list[int]:
    """Parse numbers of at least 1, separated by commas.

    Raises:
        ArgumentTypeError: the text is something else.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected whole numbers of at least 1 with commas between them, got {text!r}"
        )
    return [int(part) for part in parts]


def _parse_count(text: str) -> int:
    """Parse one number of at least 1.

    Raises:
        ArgumentTypeError: the text is something else.
    """
    if not (text.strip().isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fusednorm.warm", description=__doc__)
    parser.add_argument(
        "--arch", type=_parse_sizes, required=True, help="compute capabilities without the dot, as in 80,90"
    )
    parser.add_argument(
        "--multiprocessors", type=_parse_count, help="of a GPU that is not among the known ones of its architecture"
    )
    parser.add_argument(
        "--lengths",
        type=_parse_sizes,
        default=DEFAULT_LENGTHS,
        help="of rows, as in 768,4096 [default: %(default)s]",
    )
    parser.add_argument(
        "--only-warm-up", action="store_true", help="leave out what layers with parameters of x's dtype need"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=_parse_count, default=cores, help="processes [default: one a core, %(default)s here]"
    )
    parser.add_argument(
        "--until-gone", type=int, metavar="PID", help="stop when the process of that number is gone"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
