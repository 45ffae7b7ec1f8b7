"""Hashes of what is compiled depend on what is computed, and on no name."""

import json

from tests.kernels.harness.compiled import compile_elsewhere

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def {helper}({value}, {scale}: tl.constexpr):
    return {value} * {scale} + {constant}


@triton.jit(noinline=True)
def {called}({value}):
    return tl.sqrt({value})


@triton.jit(do_not_specialize=["{size}"])
def {kernel}({source}, {target}, {size}, {block}: tl.constexpr):
    at = tl.program_id(0) * {block} + tl.arange(0, {block})
    loaded = tl.load({source} + at, mask=at < {size})
    # A comment of {kernel}.
    tl.store({target} + at, {helper}(loaded, 2) + {called}(tl.sum(loaded, 0)), mask=at < {size})
"""


NAMES = {
    name: name for name in ("helper", "called", "kernel", "value", "scale", "source", "target", "size", "block")
} | {"constant": "1.0"}


RENAMED = {name: f"longer_name_of_{value}" for name, value in NAMES.items()} | {"constant": "1.0"}


COMPILE = """
import importlib.util, json, sys
import torch
from benchmarks.fingerprints.machine_code import make_code_line, compute_ir_hash
from fusednorm.launch.inspection import specialise_kernel
from fusednorm.launch.launches import Launch
from fusednorm.tensors.arrays import describe_as_array

specialisations = []
for path, kernel, block in json.loads(sys.argv[1]):
    found = importlib.util.spec_from_file_location(f"module_of_{kernel}", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    x, y = (describe_as_array(name, torch.empty(100, device="meta")) for name in ("x", "y"))
    launch = Launch(getattr(module, kernel), (1,), (x, y, 100), {block: 128, "num_warps": 2})
    specialisations.append(specialise_kernel(launch))
lines = [(compute_ir_hash(each), *make_code_line(each, {}).split()) for each in specialisations]
known = make_code_line(specialisations[0], {lines[0][1]: "what is known of it"})
print(json.dumps([lines, known]))
"""


def test_hashes_of_ir_and_code_depend_on_what_is_computed_and_on_no_name(tmp_path):
    written = []
    for place, names in enumerate((NAMES, RENAMED, NAMES | {"constant": "3.0"})):
        path = tmp_path / str(place) / f"module{place}.py"
        path.parent.mkdir()
        # At another line as well.
        path.write_text("\n" * 7 * place + KERNEL.format(**names))
        written.append((str(path), names["kernel"], names["block"]))
    (first, renamed, other), known = compile_elsewhere(COMPILE, json.dumps(written))
    assert first == renamed
    assert all(ours != others for ours, others in zip(first[:3], other[:3], strict=True))
    assert known == "what is known of it"
