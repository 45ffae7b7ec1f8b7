import tomllib
from collections import Counter

import pytest
from normload.load.request_cases import OPERATIONS, RequestCase
from normload.load.toml_tables import ScenarioError, TomlTable
from normload.load.workload import Workload, read_workload
from normserve.client import DType


def drawn(seed, **options):
    return [case for case, _ in Workload(**{"max_bytes": 2**16, "pool": 40} | options).draw_cases(seed)]


def test_a_seed_says_all():
    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    first, again = (drawn(seed=1)[0].make_tensors() for _ in range(2))
    assert first == again


@pytest.mark.parametrize("max_bytes", [1, 100, 2**12, 2**18])
def test_no_tensor_is_larger_than_it_may_be(max_bytes):
    for case in drawn(seed=3, max_bytes=max_bytes, pool=100):
        assert case.make_tensors()["x"].nbytes <= max(max_bytes, 4)


def test_no_tensor_is_much_smaller_than_it_may_be():
    sizes = [case.make_tensors()["x"].nbytes for case in drawn(seed=3, min_bytes=2**15, pool=60)]
    # Shapes are those of models, so the last bytes may be left over.
    assert min(sizes) > 2**14


def test_every_kind_of_request_is_drawn():
    cases = drawn(seed=4, pool=400)
    assert {case.operation for case in cases} == set(OPERATIONS)
    assert len({case.dtype for case in cases}) == 3
    assert {case.layout for case in cases if case.op == "group_norm"} == {"nchw", "nhwc"}
    over_channels = [case for case in cases if case.op != "group_norm" and case.layout == "nchw"]
    assert {case.operation for case in over_channels} == {
        f"{op}{direction}" for op in ("layer_norm", "rms_norm") for direction in ("", "/backward")
    }
    assert {case.adaptive for case in over_channels} == {False, True}
    assert {case.residual for case in cases} == {case.affine for case in cases} == {True, False}
    for op in ("layer_norm", "rms_norm", "group_norm"):
        assert {case.adaptive for case in cases if case.op == op} == {True, False}
    assert {case.norms for case in cases if case.op == "layer_norm_chain"} > {1, 8}
    in_parts = [case for case in cases if case.parts]
    assert {case.op for case in in_parts} == {case.op for case in cases}
    assert all(2 <= case.parts <= case.shape[0] for case in in_parts)
    assert len(in_parts) < len(cases) / 4
    counts = Counter(case.operation for case in cases)
    assert counts["rms_norm"] > counts["rms_norm/backward"]


def test_groups_divide_the_channels():
    for case in drawn(seed=5, pool=300):
        if case.op == "group_norm":
            assert case.shape[case.channel_axis] % case.num_groups == 0


def test_cases_of_ones_own_have_the_seed_s_numbers():
    own = Workload(cases=((RequestCase("rms_norm", (4, 8), DType.FLOAT32), 2.0),))
    ((case, share),) = own.draw_cases(1)
    assert share == 2.0
    assert case.make_tensors() != own.draw_cases(2)[0][0].make_tensors()


@pytest.mark.parametrize("key", ["mix = { layer_norm = 1 }", "min_kib = 1", "max_mib = 1", "pool = 4"])
def test_what_cases_of_ones_own_make_needless_is_said_to_be(key):
    text = f'[workload]\n{key}\n[[workload.cases]]\noperation = "rms_norm"\nshape = [4, 8]\n'
    table = TomlTable("file", tomllib.loads(text)).take_table("workload")
    name = key.partition(" ")[0]
    with pytest.raises(ScenarioError, match=rf"{name} has no effect with \[\[workload.cases\]\]"):
        read_workload(table)
