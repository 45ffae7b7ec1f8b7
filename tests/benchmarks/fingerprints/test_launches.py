from types import SimpleNamespace

import torch
from fusednorm.launch.launch import Launch

from benchmarks.fingerprints.cases import Case, Planned, Tensors
from benchmarks.fingerprints.launches import digest, full_text, summary


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
