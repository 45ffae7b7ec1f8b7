from types import SimpleNamespace

import torch
from fusednorm.arguments.arrays import new_workspace
from fusednorm.launch.launches import Launch

from benchmarks.fingerprints.cases import FingerprintCase, MetaTensors, PlannedCase
from benchmarks.fingerprints.launch_text import format_case, summarise_launches


def launch_of(name, parameter, block=128, rows=3, swapped=False, case="a case"):
    """A launch of a kernel with one compile-time parameter, and the tensors of its case."""
    tensors = MetaTensors()
    x, y = (tensors.make_tensor(role, (rows, 8), torch.float32) for role in ("x", "y"))
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__=name), arg_names=["x", "y", "w", "rows", parameter])
    x, y = map(tensors.describe, (x, y))
    both = (y, x) if swapped else (x, y)
    work = new_workspace(x, 5)
    launch = Launch(kernel, (rows,), (*both, work, rows), {parameter: block, "num_warps": 2})
    return PlannedCase(FingerprintCase(case, lambda _: []), [launch], tensors)


def test_the_hash_of_a_kernels_launches_sees_grids_constants_and_arguments_and_no_name_of_a_parameter():
    first = launch_of("a_kernel", "BLOCK")
    [summary] = summarise_launches([first]).values()
    assert summarise_launches([launch_of("another_kernel", "WIDTH")]) == {"another_kernel": summary}
    changed = (
        launch_of("a_kernel", "BLOCK", block=64),
        launch_of("a_kernel", "BLOCK", rows=4),
        launch_of("a_kernel", "BLOCK", swapped=True),
        launch_of("a_kernel", "BLOCK", case="another case"),
    )
    assert len({summarise_launches([each])["a_kernel"] for each in (first, *changed)}) == 5


def test_launches_are_counted_by_kernel():
    plans = [launch_of("a_kernel", "BLOCK"), launch_of("b_kernel", "BLOCK"), launch_of("a_kernel", "BLOCK")]
    counts = {kernel: text.split()[0] for kernel, text in summarise_launches(plans).items()}
    assert counts == {"a_kernel": "2", "b_kernel": "1"}


def test_launches_are_shown_in_full():
    assert format_case(launch_of("a_kernel", "BLOCK")) == (
        "a case\n  a_kernel[3] x:f32[3,8] y:f32[3,8] workspace1:f32[5] 3 | BLOCK=128 num_warps=2"
    )
