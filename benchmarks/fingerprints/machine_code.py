"""Triton's IR and the machine code of kernel specialisations on sm_90, both without names, and their hashes.

The IR is that before any pass.  Many specialisations are hashed on all cores, in forked processes, because kernels
cannot be pickled.
"""

import multiprocessing
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusednorm.launch.inspection import SM_90, KernelSpecialisation
from triton import knobs
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from benchmarks.fingerprints.launch_text import compute_short_hash
from benchmarks.fingerprints.specialisations import LabelledSpecialisation

_FUNCTION = re.compile(r'@(?:"[^"]*"|[\w.$-]+)')
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_NO_BITS = 8
"""The type of a section that takes memory but nothing in the file."""
_LOADED = (b".text.", b".nv.constant", b".nv.info.", b".nv.shared.")
"""Beginnings of the names of a kernel's sections, which end in its name."""
_REGISTER_COUNT, _FRAME_SIZE = 0x2F, 0x11
"""Attributes in `.nv.info`, each with a symbol and a value."""

_TASKS_A_PROCESS = 200
"""Tasks after which a process ends, to free its memory."""


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Machine code of one kernel.

    Attributes:
        content: the sections that are loaded, and their descriptions for the driver, in order.
        registers: per thread.
        local_bytes: local memory per thread, for spilled values.
        shared_bytes: shared memory per program, static and dynamic.
    """

    content: bytes
    registers: int
    local_bytes: int
    shared_bytes: int


class KernelCompilation:
    """The compilation of one specialisation to machine code, without Triton's cache.

    Attributes:
        ir: Triton's, before any pass, without locations; functions are numbered by their first appearance.
    """

    def __init__(self, specialisation: KernelSpecialisation) -> None:
        self._backend = make_backend(SM_90)
        self._options = self._backend.parse_options(dict(specialisation.options))
        self._source = specialisation.source
        # Objects that are created in the context do not outlive it.
        self._context = ir.context()
        ir.load_dialects(self._context)
        self._backend.load_dialects(self._context)
        functions = self._backend.get_codegen_implementation(self._options)
        modules = self._backend.get_module_map()
        self._module = self._source.make_ir(SM_90, self._options, functions, modules, self._context)
        self.ir = _number_functions(self._module.str_nodebug())

    def compile_code(self) -> MachineCode:
        """Machine code without line information.  Can be called once: the passes change the IR in place."""
        knobs.compilation.disable_line_info = True
        stages: dict[str, Any] = {}
        self._backend.add_stages(stages, self._options, self._source.language)
        metadata = {"target": SM_90, **vars(self._options)}
        module = self._module
        for lower in stages.values():
            module = lower(module, metadata)
        sections = _list_sections(module)
        content = b"".join(body for name, body in sections if name.startswith(_LOADED))
        attributes = _parse_attributes(next(body for name, body in sections if name == b".nv.info"))
        return MachineCode(content, attributes[_REGISTER_COUNT], attributes[_FRAME_SIZE], metadata["shared"])


def _number_functions(text: str) -> str:
    numbers: dict[str, int] = {}
    return _FUNCTION.sub(lambda name: f"@{numbers.setdefault(name[0], len(numbers))}", text)


def _list_sections(elf: bytes) -> list[tuple[bytes, bytes]]:
    """Names of sections and their content; for those without content, the size."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [_SECTION_HEADER.unpack_from(elf, start + place * _SECTION_HEADER.size) for place in range(count)]
    names_start = headers[names][4]
    sections = []
    for name, kind, _, _, offset, size, *_ in headers:
        name_start = names_start + name
        body = struct.pack("<Q", size) if kind == _NO_BITS else elf[offset : offset + size]
        sections.append((elf[name_start : elf.index(b"\0", name_start)], body))
    return sections


def _parse_attributes(info: bytes) -> dict[int, int]:
    """Attributes of the only kernel of a `.nv.info`: each has a format, a name, a size, a symbol and a value."""
    attributes = {}
    at = 0
    while at < len(info):
        _, name, size = struct.unpack_from("<BBH", info, at)
        if size == 8:
            _, attributes[name] = struct.unpack_from("<II", info, at + 4)
        at += 4 + size
    return attributes


Work = Callable[[KernelSpecialisation], str]


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
