"""Groups that start between multiples of 16 bytes."""

import pytest
from fusednorm.arguments.options import NormOptions
from fusednorm.ops.group_norm.call import GroupNormForwardCall
from fusednorm.ops.group_norm.contiguous.forward import cooperative, resident
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.results import Forward

from tests.kernels.harness.arrays import make
from tests.kernels.harness.misaligned import ALIGNED, MISALIGNED, take_all_as_whole, tensor


@pytest.mark.parametrize(
    "config", [resident.GroupNormForwardResident(4, 2), cooperative.GroupNormForwardCooperative(2, 4, 4, 1, 1)]
)
@pytest.mark.parametrize(("x_before", "y_before"), [(MISALIGNED, ALIGNED), (ALIGNED, MISALIGNED)])
def test_contiguous_groups(config, x_before, y_before):
    sample = SampleShape(2, 4, 2048, False)

    def plan(x_before, y_before):
        out = Forward(tensor(y_before, 1, 8, 2048))
        call = make(
            GroupNormForwardCall,
            x=tensor(x_before, 1, 8, 2048),
            sample=sample,
            options=NormOptions("group_norm"),
            out=out,
        )
        return plan_forward(call, config)

    assert take_all_as_whole(plan(ALIGNED, ALIGNED))
    assert not take_all_as_whole(plan(x_before, y_before))


def test_whole_slabs_of_groups_with_narrow_accesses_are_masked_like_the_others():
    def lane_a_thread(channels):
        sample = SampleShape(2, channels, 1001, False)
        shape = (1, sample.c, sample.hw)
        out = Forward(tensor(ALIGNED, *shape))
        config = cooperative.GroupNormForwardCooperative(1, 4, 4, 1, 1)
        call = make(
            GroupNormForwardCall,
            x=tensor(ALIGNED, *shape),
            sample=sample,
            options=NormOptions("group_norm"),
            out=out,
        )
        (launch,) = plan_forward(call, config)
        return launch.options["LANE_A_THREAD"]

    # Samples of 4 * 2 * 1001 elements are whole 16 bytes, those of 3 * 2 * 1001 are not.
    assert lane_a_thread(4)
    assert not lane_a_thread(3)
