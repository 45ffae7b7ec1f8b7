from benchmarks.harness import records
from benchmarks.models.cells import ModelCell
from benchmarks.report.kernel_tables import format_ratios, format_tables
from benchmarks.workload.benchmark_cells import KernelCell


def lines(*paths, long=False):
    return list(format_tables(records.read_records(paths), long))


def test_ours_stands_beside_the_best_peer_and_the_better_is_bold(write_csv, sweep_cell):
    bf16, fp32, longer = sweep_cell(1024), sweep_cell(1024, "float32"), sweep_cell(4096)
    path = write_csv(
        (longer, "copy", 1.0),
        (longer, "fusednorm", 0.97),
        (bf16, "copy", 1.0),
        (bf16, "fusednorm", 0.95),
        (bf16, "torch", 0.4),
        (bf16, "liger", 0.9),
        (fp32, "copy", 1.0),
        (fp32, "fusednorm", 0.9),
        (fp32, "compile", 0.99),
    )
    assert lines(path) == [
        "layer_norm forward, plain, x of 256 MiB; a copy moves 4000 to 4000 GB/s\n",
        "| N | bfloat16 | best peer | float32 | best peer |",
        "| --- | --- | --- | --- | --- |",
        "| 1024 | **0.950** | liger 0.900 | 0.900 | **compile 0.990** |",
        "| 4096 | **0.970** | - | - | - |",
        "",
    ]


def test_the_best_peer_stands_beside_ours_of_its_own_file(write_csv, sweep_cell):
    same, other = sweep_cell(1024), sweep_cell(4096)
    first = write_csv(
        *((cell, provider, 1.0) for cell in (same, other) for provider in ("copy", "torch")),
        *((cell, "fusednorm", 0.97) for cell in (same, other)),
        name="first.csv",
    )
    both = write_csv((same, "fusednorm", 1.04), (same, "compile", 1.02), name="both.csv")
    alone = write_csv((other, "compile", 1.01), name="alone.csv")
    assert lines(first, both, alone)[3:5] == [
        "| 1024 | **1.040** | compile 1.020 |",
        "| 4096 | 0.970 | **compile 1.010** |",
    ]


def test_rows_that_are_named_and_passes_have_tables_of_their_own(write_csv, sweep_cell):
    small = KernelCell("layer_norm", "forward", "plain", (1, 4096), 0, "bfloat16", "rows")
    cells = (sweep_cell(4096), sweep_cell(4096, pass_="backward"), sweep_cell(4096, variant="relu"), small)
    path = write_csv(*((cell, provider, 0.5) for cell in cells for provider in ("copy", "fusednorm")))
    text = lines(path)
    assert [line.split(";")[0] for line in text if line.endswith("\n")] == [
        "layer_norm forward, plain, x of 256 MiB",
        "layer_norm backward, plain, x of 256 MiB",
        "layer_norm forward, relu, x of 256 MiB",
        "layer_norm forward, plain, by shape",
    ]
    assert "| 1x4096 | **0.500** | - |" in text


def test_layouts_are_columns(write_csv):
    cells = [
        KernelCell("group_norm", "forward", "silu", (2, 320, 64, 64), 32, "float16", la) for la in ("nchw", "nhwc")
    ]
    path = write_csv(*((cell, provider, 0.5) for cell in cells for provider in ("copy", "fusednorm")))
    assert "| shape | float16 nchw | best peer | float16 nhwc | best peer |" in lines(path)


def test_the_long_form_has_every_provider(write_csv, sweep_cell):
    cell = sweep_cell(4096)
    path = write_csv((cell, "copy", 1.0), (cell, "fusednorm", 0.5), (cell, "torch", 0.4), (cell, "liger", 0.3))
    assert lines(path, long=True)[1:4] == [
        "| shape | type | layout | fusednorm | torch | liger | copy GB/s | us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 32768x4096 | bfloat16 | rows | 0.500 | 0.400 | 0.300 | 4000 | 2000.0 |",
    ]


def test_host_time_comes_in_microseconds(write_csv):
    cell = KernelCell("layer_norm", "forward", "queued", (1, 4096), 0, "bfloat16", "rows")
    path = write_csv((cell, "fusednorm", None), (cell, "torch", None))
    assert lines(path) == [
        "layer_norm forward, queued, a call in microseconds\n",
        "| shape | type | layout | fusednorm | torch |",
        "| --- | --- | --- | --- | --- |",
        "| 1x4096 | bfloat16 | rows | 5.0 | 5.0 |",
        "",
    ]


def test_models_come_in_milliseconds_with_their_speed_over_torch(write_csv):
    gpt2, vit = (ModelCell(*of).make_row("step", "eager") for of in (("gpt2", (1, 512)), ("vit", (8, 3, 224, 224))))
    path = write_csv((gpt2, "torch", None), (gpt2, "fusednorm", None), (vit, "torch", None))
    assert lines(path) == [
        "step of models, eager, in milliseconds\n",
        "| model | batch | fusednorm | torch | speed over torch |",
        "| --- | --- | --- | --- | --- |",
        "| gpt2 | 1x512 | 0.01 | 0.01 | 1.000 |",
        "| vit | 8x3x224x224 | - | 0.01 | - |",
        "",
    ]


def test_a_model_that_was_wrong_says_so(write_csv):
    figure = ModelCell("gpt2", (1, 512)).make_row("step", "eager")
    path = write_csv((figure, "torch", None), (figure, "fusednorm", "wrong"))
    assert lines(path)[3] == "| gpt2 | 1x512 | wrong | 0.01 | - |"


def test_ours_over_another_by_pass_and_layout(write_csv):
    def cell(channels, pass_="forward", layout="nhwc"):
        return KernelCell("group_norm", pass_, "silu", (2, channels, 8, 8), 32, "bfloat16", layout)

    path = write_csv(
        *((cell(64), provider, of_copy) for provider, of_copy in (("fusednorm", 0.6), ("compile", 0.2))),
        *((cell(96), provider, of_copy) for provider, of_copy in (("fusednorm", 0.5), ("compile", 0.25))),
        (cell(96), "torch", 0.9),
        *((cell(64, layout="nchw"), provider, 0.5) for provider in ("fusednorm", "compile")),
        (cell(64, "backward"), "compile", 0.1),
    )
    assert list(format_ratios(records.read_records([path]), "compile"))[2:] == [
        "| group_norm | forward | silu | nhwc | 2 | 2.00, 2x96x8x8g32 bfloat16 | 3.00, 2x64x8x8g32 bfloat16 |",
        "| group_norm | forward | silu | nchw | 1 | 1.00, 2x64x8x8g32 bfloat16 | 1.00, 2x64x8x8g32 bfloat16 |",
    ]
