"""Hashes of many specialisations, on all cores: workers are forked, because kernels cannot be pickled."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from fusednorm.launch.inspection import Specialisation

from benchmarks.fingerprints.code import Compilation
from benchmarks.fingerprints.launches import short_hash
from benchmarks.fingerprints.specialisations import Labelled

Work = Callable[[Specialisation], str]

_TASKS_A_PROCESS = 200
"""Tasks after which a process ends, to free its memory."""


def ir_hash(specialisation: Specialisation) -> str:
    """The hash of Triton's IR before any pass with the compiler's options, the first word of `code_line`."""
    return _ir_hash(specialisation, Compilation(specialisation))


def code_line(specialisation: Specialisation, known: Mapping[str, str]) -> str:
    """Two hashes, of the IR with the compiler's options and of the code; registers, local and shared memory.

    Args:
        known: lines by their first hash, from the same version of Triton: these are not compiled again.
    """
    compilation = Compilation(specialisation)
    before = _ir_hash(specialisation, compilation)
    if before in known:
        return known[before]
    code = compilation.code()
    after = short_hash(code.content)
    return f"{before} {after} {code.registers} registers, {code.local_bytes} local, {code.shared_bytes} shared"


def _ir_hash(specialisation: Specialisation, compilation: Compilation) -> str:
    options = sorted(specialisation.options.items())
    return short_hash(f"{options}\n{compilation.ir}".encode())


def on_all_cores(work: Work, labelled: Sequence[Labelled]) -> Iterator[tuple[str, str]]:
    """Labels and the results of `work` for each specialisation, in the order of completion."""
    context = multiprocessing.get_context("fork")
    cores = len(os.sched_getaffinity(0))
    with context.Pool(cores, _begin, (work, labelled), maxtasksperchild=_TASKS_A_PROCESS) as pool:
        yield from pool.imap_unordered(_one, range(len(labelled)))


_given: list[tuple[Work, Sequence[Labelled]]] = []


def _begin(work: Work, labelled: Sequence[Labelled]) -> None:
    """Keep the work and the specialisations in a new process."""
    _given[:] = [(work, labelled)]


def _one(place: int) -> tuple[str, str]:
    [(work, labelled)] = _given
    return labelled[place].label, work(labelled[place].specialisation)
