"""Fingerprints: what their hashes depend on, and that cases reach everything that the launch tables say."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import fusednorm
import pytest
import torch
from fusednorm.device import INTERPRETED
from fusednorm.errors import UnsupportedShapeError
from fusednorm.launch.launch import Launch
from fusednorm.policy import batch_invariance, waiting

from benchmarks.fingerprints import files
from benchmarks.fingerprints.__main__ import main
from benchmarks.fingerprints.cases import Case, Planned, Tensors, planned
from benchmarks.fingerprints.launches import digest, full_text, summary
from tests.kernels.compiled import compile_elsewhere

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
from benchmarks.fingerprints.workers import code_line, ir_hash
from fusednorm.launch.inspection import specialise
from fusednorm.launch.launch import Launch

specialisations = []
for path, kernel, block in json.loads(sys.argv[1]):
    found = importlib.util.spec_from_file_location(f"module_of_{kernel}", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    x, y = torch.empty(2, 100, device="meta")
    launch = Launch(getattr(module, kernel), (1,), (x, y, 100), {block: 128, "num_warps": 2})
    specialisations.append(specialise(launch))
lines = [(ir_hash(each), *code_line(each, {}).split()) for each in specialisations]
known = code_line(specialisations[0], {lines[0][1]: "what is known of it"})
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


REACH = """
import json, sys
from benchmarks.fingerprints import group_norm, layer_norm
from benchmarks.fingerprints.cases import planned
from fusednorm.ops.group_norm import table as group_norm_tables
from fusednorm.ops.layer_norm import choice as layer_norm_choice
from fusednorm.ops.layer_norm import table as layer_norm_tables

cases = [*layer_norm.cases(), *group_norm.cases()]
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
    if hasattr(kind, "launches"):
        def launches(config, call):
            reached.add(table)
            return kind.launches(config, call)
        namespace["launches"] = launches
    return type(kind.__name__, (kind,), namespace)(**fields)

def noted(launches):
    def launches_and_note(call, config):
        # What no table holds has none.
        reached.add(getattr(config, "entry", None))
        return launches(call, config)
    return launches_and_note

for module in (layer_norm_tables, group_norm_tables):
    for name, value in vars(module).copy().items():
        if name.startswith(("FORWARD", "BACKWARD", "TILES", "FLOAT8", "CHAIN")):
            setattr(module, name, tagged(f"{module.__name__}.{name}", value))
for name, value in vars(layer_norm_choice).copy().items():
    if name.endswith("_launches"):
        setattr(layer_norm_choice, name, noted(value))
kernels = set()
for case in cases:
    # Tables are by the bytes of an element, and all else is the same for both of two.
    if " f16 " in case.name:
        continue
    if case.name.endswith((" plain", " residual", ", nothing waits", "layout")) or "chain" in case.name:
        kernels |= {launch.kernel.fn.__name__ for launch in planned(case).launches or ()}
print(json.dumps([sorted(entries - reached), len(entries), sorted(kernels)]))
"""


def test_a_case_reaches_every_entry_of_every_table_and_every_kernel():
    unreached, entries, kernels = compile_elsewhere(REACH)
    assert unreached == []
    assert entries > 150
    sources = "\n".join(path.read_text() for path in Path(fusednorm.__file__).parent.rglob("*.py"))
    defined = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    assert len(defined) > 40
    assert defined == set(kernels)


def launch_of(name, parameter, block=128, rows=3, swapped=False):
    """A launch of a kernel with one compile-time parameter, and the tensors of its case."""
    tensors = Tensors()
    x, y = (tensors.new(role, (rows, 8), torch.float32) for role in ("x", "y"))
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__=name), arg_names=["x", "y", "w", "rows", parameter])
    both = (y, x) if swapped else (x, y)
    work = torch.empty(5, device="meta")
    launch = Launch(kernel, (rows,), (*both, work, rows), {parameter: block, "num_warps": 2})
    return Planned(Case("a case", lambda _: []), [launch], tensors)


def test_the_hash_of_launches_sees_arguments_and_no_name():
    first = launch_of("a_kernel", "BLOCK")
    assert summary(first) == ("a case", f"{digest(first)} a_kernel")
    assert digest(launch_of("another_kernel", "WIDTH")) == digest(first)
    changed = (
        launch_of("a_kernel", "BLOCK", block=64),
        launch_of("a_kernel", "BLOCK", rows=4),
        launch_of("a_kernel", "BLOCK", swapped=True),
    )
    assert len({digest(each) for each in (first, *changed)}) == 4


def test_launches_are_shown_in_full():
    assert full_text(launch_of("a_kernel", "BLOCK")) == (
        "a case\n  a_kernel[3] x:f32[3,8] y:f32[3,8] workspace1:f32[5] 3 | BLOCK=128 num_warps=2"
    )


def test_a_call_that_is_refused_is_a_case_as_well():
    def refuse(_):
        raise UnsupportedShapeError("too long")

    assert summary(planned(Case("a case", refuse))) == ("a case", "refused")


def test_the_policy_of_a_case_holds_for_it_alone():
    seen = []

    def plan(_):
        seen.append((waiting._allowed, batch_invariance.is_batch_invariant()))
        return []

    planned(Case("a case", plan, waits=False, batch_invariant=True))
    planned(Case("another", plan))
    assert seen == [(False, True), (True, False)]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    assert files.read(path) == ("", {})
    files.write(path, "# head", {"b c": "two", "a": "one: 1"})
    assert path.read_text() == "# head\na: one: 1\nb c: two\n"
    assert files.read(path) == ("# head", {"a": "one: 1", "b c": "two"})


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is for machines without a GPU")
def test_nothing_is_written_in_the_interpreter_and_for_parts_that_are_none(tmp_path, capsys):
    for parts in (["launches"], ["unknown"], ["show"]):
        with pytest.raises(SystemExit):
            main([*parts, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
    assert "TRITON_INTERPRET" in capsys.readouterr().err
