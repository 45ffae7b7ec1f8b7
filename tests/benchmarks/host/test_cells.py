import pytest

from benchmarks.host.cells import CELLS


def test_every_cell_has_a_name_of_its_own():
    assert len({cell.name for cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm forward plain 16x4096 bfloat16 rows",
        "rms_norm backward plain 65536x768 bfloat16 rows",
        "layer_norm backward plain 1151x8192 float16 rows",
        "group_norm backward plain 2x1280x16x16g32 bfloat16 nhwc",
        "rms_norm forward_backward plain 1151x8192 float16 rows",
        "group_norm forward_backward silu 2x1280x16x16g32 bfloat16 nchw",
        "group_norm forward_backward silu 16x320x64x64g32 bfloat16 nhwc",
    ],
)
def test_every_kind_is_there(name):
    assert name in {cell.name for cell in CELLS}
