"""Rows that start between multiples of 16 bytes."""

import pytest
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.launches import has_one_lane_per_thread
from fusednorm.ops.layer_norm.call import LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_forward
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative
from fusednorm.ops.layer_norm.forward.resident import LayerNormForwardResident
from fusednorm.ops.layer_norm.forward.split import LayerNormForwardSplit
from fusednorm.results import Forward
from fusednorm.tensors.arrays import describe_as_array

from tests.kernels.harness.arrays import make
from tests.kernels.harness.misaligned import ALIGNED, MISALIGNED, take_all_as_whole, tensor


def test_accesses_of_16_bytes_need_width_and_place():
    x = describe_as_array("x", tensor(ALIGNED, 64))
    assert has_one_lane_per_thread(16, x, None)
    assert not has_one_lane_per_thread(8, x)
    assert not has_one_lane_per_thread(16, x, describe_as_array("y", tensor(MISALIGNED, 64)))


@pytest.mark.parametrize(
    ("cols", "config"),
    [
        (4096, LayerNormForwardResident(4, 4, 4, 2)),
        (8192, LayerNormForwardCooperative(4, 4, 5, 2, 1)),
        (1 << 20, LayerNormForwardSplit(4, 8, 2, 4, 16)),
    ],
)
def test_rows(cols, config):
    def plan(x_before, y_before, x_stride=cols):
        x = tensor(x_before, 2, x_stride)[:, :cols]
        out = Forward(tensor(y_before, 2, cols))
        return plan_forward(make(LayerNormForwardCall, x=x, options=NormOptions("layer_norm"), out=out), config)

    assert take_all_as_whole(plan(ALIGNED, ALIGNED))
    assert not take_all_as_whole(plan(MISALIGNED, MISALIGNED))
    if isinstance(config, LayerNormForwardSplit):
        # The next row starts anywhere, too; shorter rows are taken without merging where accesses are narrow.
        assert not take_all_as_whole(plan(ALIGNED, ALIGNED, cols + 1))
    else:
        assert not take_all_as_whole(plan(ALIGNED, MISALIGNED))
