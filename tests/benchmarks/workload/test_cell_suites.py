import itertools

import pytest

from benchmarks.workload.cell_suites import GROUP_SHAPES, SUITES, list_cells, select_shard
from benchmarks.workload.variants import VARIANTS


@pytest.mark.parametrize("suite", SUITES)
def test_every_cell_has_a_known_variant_and_a_name_of_its_own(suite):
    cells = list_cells([suite])
    assert cells
    assert {cell.variant for cell in cells} <= VARIANTS.keys()
    assert len({cell.name for cell in cells}) == len(cells)


def test_a_cell_of_two_suites_is_timed_once():
    assert len(list_cells(["plain", "layer_norm"])) == len(list_cells(["layer_norm"]))


def test_cells_over_the_same_tensors_stand_together():
    tensors = [(cell.shape, cell.dtype, cell.layout) for cell in list_cells(["plain", "residual", "activation"])]
    changes = sum(a != b for a, b in itertools.pairwise(tensors))
    assert changes == len(set(tensors)) - 1


def test_shards_are_about_equal_and_together_the_whole():
    cells = list_cells(["layer_norm"])
    shards = [select_shard(cells, index, 5) for index in range(1, 6)]
    assert sorted(cell.name for part in shards for cell in part) == sorted(cell.name for cell in cells)
    assert max(map(len, shards)) - min(map(len, shards)) <= 20


def test_cells_over_the_same_tensors_are_of_one_shard():
    cells = list_cells(["plain", "residual"])
    shards = [{(cell.shape, cell.dtype) for cell in select_shard(cells, index, 4)} for index in range(1, 5)]
    assert sum(map(len, shards)) == len({(cell.shape, cell.dtype) for cell in cells})


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm forward plain 512x262144 bfloat16 rows",
        "rms_norm backward plain 262144x256 float32 rows",
        "rms_norm forward residual 32768x4096 float16 rows",
        "layer_norm forward gelu_tanh 8192x16384 bfloat16 rows",
        "layer_norm backward dropout 8192x8192 float32 rows",
        "layer_norm forward plain 1x33554432 bfloat16 rows",
        "layer_norm backward plain 4096x15872 float16 rows",
        "layer_norm forward plain 2048x8192 float32 rows",
        "layer_norm forward plain 1x4096 bfloat16 rows",
        "rms_norm backward per_head 32768x32x128 bfloat16 heads",
        "layer_norm backward residual_float32 16384x8192 bfloat16 rows",
        "rms_norm forward float8 131072x1024 bfloat16 rows",
        "layer_norm forward chain 8192x16384 bfloat16 rows",
    ],
)
def test_layer_norm_has_every_kind_of_cell(name):
    assert name in {cell.name for cell in list_cells(["layer_norm"])}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(
    ("suite", "cell"),
    [
        ("adaptive", "layer_norm {} adaptive 2x4096x3072 bfloat16 samples"),
        ("adaptive", "layer_norm {} gated 1x4608x3072 bfloat16 samples"),
        ("adaptive", "rms_norm {} adaptive 16x1024x1152 bfloat16 samples"),
        ("channels", "layer_norm {} plain 32x512x14x14 bfloat16 nchw"),
        ("channels", "layer_norm {} plain 2x64x512x512 bfloat16 nhwc"),
        ("instance", "group_norm {} plain 2x32x96x96x96g32 bfloat16 nhwc"),
        ("instance", "group_norm {} leaky_relu 8x128x28x28g128 bfloat16 nchw"),
    ],
)
def test_norms_of_samples_channels_and_instances_have_every_kind_of_cell(suite, cell, pass_):
    assert cell.format(pass_) in {cell.name for cell in list_cells([suite])}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_group_norm_has_every_shape_in_every_dtype_and_layout(dtype, layout, pass_):
    names = {cell.name for cell in list_cells(["group_norm"])}
    assert len(GROUP_SHAPES) == 12
    for shape in GROUP_SHAPES:
        assert f"group_norm {pass_} silu {'x'.join(map(str, shape))}g32 {dtype} {layout}" in names


@pytest.mark.parametrize(
    "name",
    [
        "group_norm forward plain 8x512x64x64g32 bfloat16 nhwc",
        "group_norm backward residual 4x256x256x256g32 bfloat16 nchw",
        "group_norm backward scale_shift_silu 2x320x64x64g32 bfloat16 nhwc",
        "group_norm forward no_affine 16x128x64x64g128 bfloat16 nchw",
        "group_norm backward silu 4x64x256x256g64 bfloat16 nhwc",
        "group_norm forward silu 1x128x1024x1024g1 bfloat16 nhwc",
        "group_norm backward silu 8x96x64x64g32 bfloat16 nchw",
        "group_norm forward silu 8x320x59x61g32 bfloat16 nhwc",
        "group_norm backward silu 16x512x4096g32 bfloat16 nchw",
        "group_norm forward silu 2x256x16x64x64g32 bfloat16 nhwc",
    ],
)
def test_group_norm_has_every_kind_of_cell(name):
    assert name in {cell.name for cell in list_cells(["group_norm"])}
