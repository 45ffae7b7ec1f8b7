from collections import Counter
from itertools import islice

import pytest
from normload.workload import DEFAULT_MIX, OPERATIONS, Workload, parse_mix


def drawn(seed, count=50, **options):
    workload = Workload(DEFAULT_MIX, **{"max_bytes": 2**16, "pool": 40} | options, seed=seed)
    return [request.case for request in islice(workload, count)]


def test_a_seed_says_all():
    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    first, again = (drawn(seed=1, count=1)[0].tensors() for _ in range(2))
    assert first == again


@pytest.mark.parametrize("max_bytes", [1, 100, 2**12, 2**18])
def test_no_tensor_is_larger_than_it_may_be(max_bytes):
    for case in drawn(seed=3, max_bytes=max_bytes, count=200):
        assert case.tensors()["x"].nbytes <= max(max_bytes, 4)


def test_every_kind_of_request_is_drawn():
    cases = drawn(seed=4, count=2000, pool=400)
    assert {case.operation for case in cases} == set(OPERATIONS)
    assert len({case.dtype for case in cases}) == 3
    assert {case.layout for case in cases} == {"nchw", "nhwc"}
    assert {case.residual for case in cases} == {case.affine for case in cases} == {True, False}
    assert {case.op for case in cases if case.adaptive} == {"group_norm"}
    assert not all(case.adaptive for case in cases if case.op == "group_norm")
    counts = Counter(case.operation for case in cases)
    assert counts["rms_norm"] > counts["rms_norm/backward"]


def test_groups_divide_the_channels():
    for case in drawn(seed=5, count=300):
        if case.op == "group_norm":
            assert case.shape[case.channel_axis] % case.num_groups == 0


def test_a_mix_is_read():
    assert parse_mix("layer_norm=3, group_norm/backward") == {"layer_norm": 3, "group_norm/backward": 1}


@pytest.mark.parametrize("text", ["", "batch_norm", "layer_norm=0", "layer_norm=x", "layer_norm=nan", "rms_norm,"])
def test_a_mix_that_means_nothing_is_refused(text):
    with pytest.raises(ValueError, match=r"operation|weight|float"):
        parse_mix(text)
