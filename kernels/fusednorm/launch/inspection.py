"""Results of compiling a launch: registers, spills and access widths, also for a GPU that is not present.

It needs Triton's compiler, so TRITON_INTERPRET must be unset.
"""

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from fusednorm.arguments.arrays import Array
from fusednorm.launch.launches import Launch

SM_90 = GPUTarget("cuda", 90, 32)

_POINTER = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float8_e4m3fn": "*fp8e4nv",
    "int64": "*i64",
}
_REPORT = "ptxas.txt"
_DIVISIBLE: list[list[object]] = [["tt.divisibility", 16]]
_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(?:\.v([248]))?\.b(8|16|32|64)\b")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The resources and memory accesses of a compiled kernel.

    Attributes:
        kernel: its name.
        registers: registers per thread.
        spilled_bytes: bytes of stores to and loads from local memory, per thread.
        shared_bytes: static and dynamic shared memory of a program.
        access_bytes: for "ld", "st" and "cp", how often each access width, in bytes per thread, occurs in the code.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    access_bytes: dict[str, Counter[int]]


@dataclass(frozen=True, slots=True)
class KernelSpecialisation:
    """The input of Triton's compiler for the kernel of a launch.

    Attributes:
        source: the kernel, with types for its arguments and values for its constexprs.
        options: the compiler's options.
    """

    source: ASTSource
    options: dict[str, Any]


def specialise_kernel(launch: Launch) -> KernelSpecialisation:
    """Make the compiler's input for a launch, specialised for its arguments as Triton would do at the launch."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    values = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | dict(launch.options)
    for index, parameter in enumerate(launch.kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple("constexpr" if t is None else _POINTER[t.dtype] for t in value)
            constants |= {(index, place): None for place, t in enumerate(value) if t is None}
            attributes |= {(index, place): _DIVISIBLE for place, t in enumerate(value) if _is_aligned(t)}
        elif isinstance(value, Array):
            signature[parameter.name] = _POINTER[value.dtype]
            if _is_aligned(value):
                attributes[(index,)] = _DIVISIBLE
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif not parameter.do_not_specialize and not parameter.annotation_type and value == 1:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[parameter.name] = parameter.annotation_type or ("i32" if _is_int32(value) else "i64")
            if not parameter.do_not_specialize and value % 16 == 0:
                attributes[(index,)] = _DIVISIBLE
    options = {name: value for name, value in launch.options.items() if name not in launch.kernel.arg_names}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return KernelSpecialisation(source, {"enable_fp_fusion": True, **options})


def _is_aligned(array: Array | None) -> bool:
    return array is not None and array.is_aligned


def _is_int32(value: int) -> bool:
    return -(2**31) <= value < 2**31


def inspect_launch(launch: Launch, target: GPUTarget = SM_90) -> KernelReport:
    """Compile the kernel of a launch for `target`, and report its registers, spills and memory accesses."""
    specialised = specialise_kernel(launch)
    compiled = triton.compile(specialised.source, target=target, options=specialised.options)
    registers, spilled, static_shared = _assemble_ptx(compiled.asm["ptx"], target)
    return KernelReport(
        kernel=launch.kernel.fn.__name__,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=max(static_shared, compiled.metadata.shared),
        access_bytes=_count_access_widths(compiled.asm["ptx"]),
    )


def _assemble_ptx(ptx: str, target: GPUTarget) -> tuple[int, int, int]:
    """Assemble PTX; return registers per thread, spilled bytes per thread and bytes of static shared memory."""
    text = _get_or_make_assembler_report(ptx, target)
    registers = int(re.findall(r"Used (\d+) registers", text)[-1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))
    shared = [int(n) for n in re.findall(r"(\d+) bytes smem", text)]
    return registers, spilled, max(shared, default=0)


def _get_or_make_assembler_report(ptx: str, target: GPUTarget) -> str:
    """Return the assembler's report on PTX, from Triton's cache or by running the assembler.

    A new report is stored in the cache.
    """
    ptxas = nvidia.get_ptxas(target.arch)
    options = ["-v", f"-arch=sm_{target.arch}{'a' if target.arch >= 90 else ''}"]
    key = "\0".join([ptxas.version, *options, ptx])
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    cached_report = cache.get_file(_REPORT)
    if cached_report is not None:
        return Path(cached_report).read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas.path, *options, str(path), "-o", str(path) + ".cubin"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    cache.put(text, _REPORT, binary=False)
    return text


def _count_access_widths(ptx: str) -> dict[str, Counter[int]]:
    """Count the loads, stores and asynchronous copies of global memory in PTX by their bytes per thread."""
    widths: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter(), "cp": Counter()}
    for kind, vector, bits in _ACCESS.findall(ptx):
        widths[kind][int(vector or 1) * int(bits) // 8] += 1
    for copied in _COPY.findall(ptx):
        widths["cp"][int(copied, 16)] += 1
    return widths
