from benchmarks.workload.benchmark_cells import KernelCell, compute_sweep_rows


def test_a_cell_is_named_by_what_it_times():
    cell = KernelCell("layer_norm", "forward", "plain", (4096, 8192), 0, "bfloat16", "rows")
    assert cell.name == "layer_norm forward plain 4096x8192 bfloat16 rows"


def test_groups_stand_after_the_shape():
    cell = KernelCell("group_norm", "backward", "silu", (8, 512, 64, 64), 32, "float16", "nhwc")
    assert cell.name == "group_norm backward silu 8x512x64x64g32 float16 nhwc"


def test_a_sweep_keeps_the_bytes_of_x():
    assert compute_sweep_rows(4096, "bfloat16") * 4096 * 2 == 256 << 20
    assert compute_sweep_rows(4096, "float32") * 4096 * 4 == 256 << 20
