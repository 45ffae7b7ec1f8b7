import itertools

import pytest

from benchmarks.suites import SUITES, cells_of, shard
from benchmarks.variants import VARIANTS


@pytest.mark.parametrize("suite", SUITES)
def test_every_cell_has_a_known_variant_and_a_name_of_its_own(suite):
    cells = cells_of([suite])
    assert cells
    assert {cell.variant for cell in cells} <= VARIANTS.keys()
    assert len({cell.name for cell in cells}) == len(cells)


def test_a_cell_of_two_suites_is_timed_once():
    assert len(cells_of(["plain", "layer_norm"])) == len(cells_of(["layer_norm"]))


def test_cells_over_the_same_tensors_stand_together():
    tensors = [(cell.shape, cell.dtype, cell.layout) for cell in cells_of(["plain", "residual", "activation"])]
    changes = sum(a != b for a, b in itertools.pairwise(tensors))
    assert changes == len(set(tensors)) - 1


def test_shards_are_about_equal_and_together_the_whole():
    cells = cells_of(["layer_norm"])
    shards = [shard(cells, index, 5) for index in range(1, 6)]
    assert sorted(cell.name for part in shards for cell in part) == sorted(cell.name for cell in cells)
    assert max(map(len, shards)) - min(map(len, shards)) <= 20


def test_cells_over_the_same_tensors_are_of_one_shard():
    cells = cells_of(["plain", "residual"])
    shards = [{(cell.shape, cell.dtype) for cell in shard(cells, index, 4)} for index in range(1, 5)]
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
    assert name in {cell.name for cell in cells_of(["layer_norm"])}
