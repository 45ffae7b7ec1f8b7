import pytest

from benchmarks.harness import records
from benchmarks.harness.timing import TimeQuantiles
from benchmarks.workload.benchmark_cells import KernelCell

CELL = KernelCell("layer_norm", "forward", "plain", (4096, 8192), 0, "bfloat16", "rows")


def test_columns_are_those_that_readers_know():
    assert ",".join(records.COLUMNS) == (
        "op,pass,variant,shape,dtype,layout,provider,ms_p20,ms_p50,ms_p80,gbps,of_copy,max_error"
    )


def test_bandwidth_is_fewest_bytes_over_the_median():
    row = records.make_row(CELL, "torch", TimeQuantiles(0.1, 0.2, 0.3), 0.5, nbytes=200_000_000, roof=4e9)
    assert (row["ms_p50"], row["gbps"], row["of_copy"]) == ("0.20000", "1000", "0.250")
    assert tuple(row) == records.COLUMNS


def test_host_time_has_no_bandwidth():
    row = records.make_row(CELL, "torch", TimeQuantiles(0.1, 0.2, 0.3), 0.5)
    assert (row["gbps"], row["of_copy"]) == ("", "")


def test_the_first_of_two_rows_holds(write_csv):
    first = write_csv((CELL, "torch", 0.5), (CELL, "liger", 0.6), name="first.csv")
    again = write_csv((CELL, "torch", 0.7), (CELL, "compile", 0.4), name="again.csv")
    fractions = {row["provider"]: row["of_copy"] for row in records.read_records([first, again])}
    assert fractions == {"torch": "0.500", "liger": "0.600", "compile": "0.400"}


def test_a_row_knows_ours_of_its_own_file(write_csv):
    files = (
        write_csv((CELL, "fusednorm", 0.9), (CELL, "torch", 0.5), name="first.csv"),
        write_csv((CELL, "fusednorm", 0.8), (CELL, "compile", 0.7), name="second.csv"),
        write_csv((CELL, "liger", 0.6), name="third.csv"),
    )
    ours = {row["provider"]: row["ours"] for row in records.read_records(files)}
    assert ours == {"fusednorm": "0.900", "torch": "0.900", "compile": "0.800", "liger": ""}


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "is_sweep"),
    [
        ("32768x4096", "bfloat16", "rows", True),
        ("32768x4096", "float32", "rows", False),
        ("64x1048576", "float32", "rows", False),
        ("8x512x64x64g32", "bfloat16", "nchw", False),
    ],
)
def test_a_sweep_is_known_by_its_bytes_and_its_length(shape, dtype, layout, is_sweep):
    assert records.is_sweep_row({"shape": shape, "dtype": dtype, "layout": layout}) is is_sweep
