"""Cases reach everything that the launch tables say."""

import re
from pathlib import Path

import fusednorm
from fusednorm.errors import UnsupportedShapeError
from fusednorm.policy import batch_invariance, cooperative_launches

from benchmarks.fingerprints.cases import FingerprintCase, plan_case
from benchmarks.fingerprints.launch_text import format_case
from tests.kernels.harness.compiled import compile_elsewhere

REACH = """
import json, sys
from benchmarks.fingerprints import group_norm_cases, layer_norm_cases
from benchmarks.fingerprints.cases import plan_case
from fusednorm.ops.group_norm import config_tables as group_norm_tables
from fusednorm.ops.layer_norm import choices as layer_norm_choice
from fusednorm.ops.layer_norm import config_tables as layer_norm_tables
from fusednorm.ops.layer_norm.channels_first import config_tables as channel_tables

cases = [*layer_norm_cases.iterate_cases(), *group_norm_cases.iterate_cases()]
entries, reached = set(), set()

def tagged(table, value):
    # A class of its own for each entry outlives `dataclasses.replace`.
    if isinstance(value, dict):
        return {size: tagged(f"{table}[{size}]", of_size) for size, of_size in value.items()}
    if isinstance(value, tuple):
        return tuple((*bounds, tagged(f"{table} {bounds}", config)) for *bounds, config in value)
    entries.add(table)
    kind = type(value)
    fields = {name: getattr(value, name) for name in kind.__dataclass_fields__}
    namespace = {"__slots__": (), "entry": table}
    if hasattr(kind, "plan_launches"):
        def plan_launches(config, call):
            reached.add(table)
            return kind.plan_launches(config, call)
        namespace["plan_launches"] = plan_launches
    return type(kind.__name__, (kind,), namespace)(**fields)

def noted(launches):
    def launches_and_note(call, config):
        # What no table holds has none.
        reached.add(getattr(config, "entry", None))
        return launches(call, config)
    return launches_and_note

for module in (layer_norm_tables, channel_tables, group_norm_tables):
    for name, value in vars(module).copy().items():
        if name.startswith(("FORWARD", "BACKWARD", "TILES", "FLOAT8", "CHAIN")):
            setattr(module, name, tagged(f"{module.__name__}.{name}", value))
for name, value in vars(layer_norm_choice).copy().items():
    # plan_tile_forward and its like, not plan_forward, which chooses among them.
    if name.startswith("plan_") and name.count("_") > 1:
        setattr(layer_norm_choice, name, noted(value))
kernels = set()
for case in cases:
    # Tables are by the bytes of an element, and all else is the same for both of two.
    if " f16 " in case.name:
        continue
    suffixes = " plain", " residual", " adaptive", " gated", ", nothing waits", "layout"
    if case.name.endswith(suffixes) or "chain" in case.name:
        kernels |= {launch.kernel.fn.__name__ for launch in plan_case(case).launches or ()}
print(json.dumps([sorted(entries - reached), len(entries), sorted(kernels)]))
"""


def test_a_case_reaches_every_entry_of_every_table_and_every_kernel():
    unreached, entries, kernels = compile_elsewhere(REACH)
    assert unreached == []
    assert entries > 150
    sources = "\n".join(path.read_text() for path in Path(fusednorm.__file__).parent.rglob("*.py"))
    defined = set(re.findall(r"^@triton\.jit[^@]*?^def (\w+_kernel)\(", sources, re.MULTILINE))
    assert len(defined) > 35
    assert defined == set(kernels)


def test_a_call_that_is_refused_is_a_case_as_well():
    def refuse(_):
        raise UnsupportedShapeError("too long")

    assert format_case(plan_case(FingerprintCase("a case", refuse))) == "a case: refused"


def test_the_policy_of_a_case_holds_for_it_alone():
    seen = []

    def plan(_):
        seen.append((cooperative_launches._allowed, batch_invariance.is_batch_invariant()))
        return []

    plan_case(FingerprintCase("a case", plan, may_wait=False, batch_invariant=True))
    plan_case(FingerprintCase("another", plan))
    assert seen == [(False, True), (True, False)]
