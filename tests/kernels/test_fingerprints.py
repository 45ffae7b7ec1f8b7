"""Launches, and a sample of machine code, change where somebody means them to."""

import json

import pytest

from benchmarks.fingerprints import files
from tests.kernels.harness.compiled import compile_elsewhere

# One of most algorithms.
OF_IR = (
    "layer_norm forward f32 4096x16 plain #0",
    "layer_norm forward f32 4096x2048 gelu #0",
    "layer_norm forward f32 4096x32768 fused #0",
    "layer_norm backward f32 4096x16 plain #1",
    "layer_norm backward f32 4096x16384 plain, nothing waits #1",
    "layer_norm float8 f32 4096x16 plain #0",
    "layer_norm chain f32 4096x16 of 2 #0",
    "group_norm contiguous forward f32 4x32x4x49 relu #0",
    "group_norm contiguous backward f32 4x32x4x262144 plain #2",
    "group_norm channels-last forward f32 4x32x1x1 plain #0",
    "group_norm channels-last forward f32 4x32x1x1023 plain #0",
    "group_norm channels-last forward f32 4x32x4x49 residual other layout #0",
    "group_norm channels-last backward f32 4x32x160x1 plain, nothing waits #2",
)
OF_CODE = (
    "layer_norm forward f32 4096x16 plain #0",
    "layer_norm backward f32 4096x16 plain #1",
    "group_norm contiguous forward f32 4x32x4x49 relu #0",
    "group_norm channels-last forward f32 4x32x1x1023 plain #0",
)

FINGERPRINTS = """
import json, sys
from benchmarks.fingerprints.cases import plan_case
from benchmarks.fingerprints.__main__ import iterate_all_cases
from benchmarks.fingerprints.launch_text import summarise_launches
from benchmarks.fingerprints.machine_code import make_code_line, compute_ir_hash
from fusednorm.launch.inspection import specialise_kernel

of_ir, of_code = json.loads(sys.argv[1])
cases = {case.name: case for case in iterate_all_cases()}

def specialisation(label):
    name, place = label.rsplit(" #", 1)
    return specialise_kernel(plan_case(cases[name]).launches[int(place)])

print(json.dumps({
    "launches": summarise_launches(map(plan_case, cases.values())),
    "ir": {label: compute_ir_hash(specialisation(label)) for label in of_ir},
    "code": {label: make_code_line(specialisation(label), {}) for label in of_code},
}))
"""


def test_launches_and_code_are_those_that_were_recorded():
    head, code = files.read_fingerprints(files.FOLDER / files.SM_90)
    if head != files.format_version():
        pytest.skip(f"machine code was recorded with {head}, and this is {files.format_version()}")
    now = compile_elsewhere(FINGERPRINTS, json.dumps([OF_IR, OF_CODE]))
    _, launches = files.read_fingerprints(files.FOLDER / files.LAUNCHES)
    remedy = "; if that is meant, run `make fingerprints` and commit what it writes"
    recorded = {
        "launches": launches,
        "ir": {label: code[label].split()[0] for label in OF_IR},
        "code": {label: code[label] for label in OF_CODE},
    }
    for part, lines in recorded.items():
        changed = [label for label in lines | now[part] if lines.get(label) != now[part].get(label)]
        assert not changed, f"other {part}: {'; '.join(changed)}{remedy}"
