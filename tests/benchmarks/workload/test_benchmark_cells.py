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


def test_parameters_of_a_norm_over_channels_are_those_of_dim_1():
    cell = KernelCell("layer_norm", "forward", "plain", (2, 8, 4, 5), 0, "bfloat16", "nhwc")
    assert cell.parameter_shape == (8,)
    assert cell.norm_options == {"activation": "none", "layout": "nchw"}


def test_groups_and_samples_take_no_layout():
    groups = KernelCell("group_norm", "forward", "leaky_relu", (2, 8, 4, 5), 8, "bfloat16", "nhwc")
    samples = KernelCell("layer_norm", "forward", "adaptive", (2, 8, 64), 0, "bfloat16", "samples")
    assert groups.norm_options == {"activation": "leaky_relu"}
    assert samples.norm_options == {"activation": "none"}
