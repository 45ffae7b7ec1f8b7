"""Hashes of many specialisations, on all cores: workers are forked, because kernels cannot be pickled."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from fusednorm.launch.inspection import KernelSpecialisation

from benchmarks.fingerprints.launch_text import compute_short_hash
from benchmarks.fingerprints.machine_code import KernelCompilation
from benchmarks.fingerprints.specialisations import LabelledSpecialisation

Work = Callable[[KernelSpecialisation], str]

_TASKS_A_PROCESS = 200
"""Tasks after which a process ends, to free its memory."""


def compute_ir_hash(specialisation: KernelSpecialisation) -> str:
    """The hash of Triton's IR before any pass with the compiler's options, the first word of `make_code_line`."""
    return _hash_ir(specialisation, KernelCompilation(specialisation))


def make_code_line(specialisation: KernelSpecialisation, known: Mapping[str, str]) -> str:
    """Two hashes, of the IR with the compiler's options and of the code; registers, local and shared memory.

    Args:
        known: lines by their first hash, from the same version of Triton: these are not compiled again.
    """
    compilation = KernelCompilation(specialisation)
    before = _hash_ir(specialisation, compilation)
    if before in known:
        return known[before]
    code = compilation.compile_code()
    after = compute_short_hash(code.content)
    return f"{before} {after} {code.registers} registers, {code.local_bytes} local, {code.shared_bytes} shared"


def _hash_ir(specialisation: KernelSpecialisation, compilation: KernelCompilation) -> str:
    options = sorted(specialisation.options.items())
    return compute_short_hash(f"{options}\n{compilation.ir}".encode())


def map_on_all_cores(work: Work, labelled: Sequence[LabelledSpecialisation]) -> Iterator[tuple[str, str]]:
    """Labels and the results of `work` for each specialisation, in the order of completion."""
    context = multiprocessing.get_context("fork")
    cores = len(os.sched_getaffinity(0))
    with context.Pool(cores, _set_work, (work, labelled), maxtasksperchild=_TASKS_A_PROCESS) as pool:
        yield from pool.imap_unordered(_run_one, range(len(labelled)))


_given: list[tuple[Work, Sequence[LabelledSpecialisation]]] = []


def _set_work(work: Work, labelled: Sequence[LabelledSpecialisation]) -> None:
    """Keep the work and the specialisations in a new process."""
    _given[:] = [(work, labelled)]


def _run_one(place: int) -> tuple[str, str]:
    [(work, labelled)] = _given
    return labelled[place].label, work(labelled[place].specialisation)
