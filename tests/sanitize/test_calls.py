"""The calls for compute-sanitizer have every algorithm, also with unaligned tensors, before any other call."""

from tests.kernels.harness.compiled import compile_elsewhere

CALLS = """
import json, pickle
import torch
from benchmarks.algorithms.kernel_algorithms import list_algorithms
from benchmarks.fingerprints.cases import plan_case
from tests.sanitize.calls import MOST_ELEMENTS, calls

chosen = pickle.loads(pickle.dumps(calls(120, (torch.float16,))))
missing = {}
for unaligned in (False, True):
    found = {each for call in chosen[:60] if call.case.unaligned == unaligned for each in call.algorithms}
    missing[unaligned] = sorted(f"{each.pass_}.{each.name}" for each in {*list_algorithms()} - found)
sizes = [plan_case(call.case).tensors.max_elements for call in chosen]
names = {call.case.name for call in chosen}
print(json.dumps([missing[False], missing[True], max(sizes) <= MOST_ELEMENTS, len(names)]))
"""


def test_the_first_calls_have_every_algorithm_and_are_small():
    missing, missing_unaligned, are_small, names = compile_elsewhere(CALLS)
    assert missing == []
    assert missing_unaligned == []
    assert are_small
    assert names == 120
