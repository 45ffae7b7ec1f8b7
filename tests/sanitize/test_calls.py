"""The calls for compute-sanitizer have every algorithm, also with unaligned tensors, before any other call."""

from tests.kernels.harness.compiled import compile_elsewhere

CALLS = """
import json, pickle
import torch
from benchmarks.algorithms.kernel_algorithms import list_algorithms
from benchmarks.fingerprints.cases import plan_case
from tests.sanitize.calls import MOST_ELEMENTS, calls

every = calls(1 << 20, (torch.float16,))
chosen = pickle.loads(pickle.dumps(every[:150]))
missing = {}
for unaligned in (False, True):
    found = {each for call in chosen[:100] if call.case.unaligned == unaligned for each in call.algorithms}
    missing[unaligned] = sorted(f"{each.pass_}.{each.name}" for each in {*list_algorithms()} - found)

def list_modulated(calls):
    return {f"{each.pass_}.{each.name}" for call in calls if call.is_modulated for each in call.algorithms}

modulated = [sorted(list_modulated(calls)) for calls in (chosen[:100], every)]
sizes = [plan_case(call.case).tensors.max_elements for call in chosen]
names = {call.case.name for call in chosen}
print(json.dumps([missing[False], missing[True], modulated, max(sizes) <= MOST_ELEMENTS, len(names)]))
"""


def test_the_first_calls_have_every_algorithm_and_are_small():
    missing, missing_unaligned, (modulated, every_modulated), are_small, names = compile_elsewhere(CALLS)
    assert missing == []
    assert missing_unaligned == []
    assert modulated == every_modulated
    assert {name for name in modulated if "channels_first" in name} == {
        f"layer_norm.channels_first.{name}"
        for name in ("forward.tile", "forward.sweep", "backward.tile", "backward.split")
    }
    assert are_small
    assert names == 150
