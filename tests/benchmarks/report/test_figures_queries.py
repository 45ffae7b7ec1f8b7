from decimal import Decimal

import pytest

from benchmarks.report import figures
from benchmarks.report.figures import (
    QueryError,
    compare_with_peers,
    format_maximum,
    format_median,
    format_median_range,
    format_minimum,
    format_range,
    format_single,
    load_rows,
)
from benchmarks.workload.benchmark_cells import KernelCell


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    load_rows.cache_clear()
    yield
    load_rows.cache_clear()


@pytest.fixture
def rows(write_csv, sweep_cell):
    """Ours and torch at two lengths, torch wrong at the second; and one shape that is named."""
    short, long = sweep_cell(1024), sweep_cell(4096)
    named = KernelCell("layer_norm", "forward", "plain", (1, 4096), 0, "bfloat16", "rows")
    write_csv(
        *((cell, "copy", 1.0) for cell in (short, long, named)),
        *((short, "fusednorm", 0.8), (short, "torch", 0.4)),
        *((long, "fusednorm", 0.9), (long, "torch", "wrong")),
        *((named, "fusednorm", 0.5), (named, "torch", 0.625)),
    )
    return load_rows("run.csv")


def numbers(*values):
    return tuple(map(Decimal, values))


def test_rows_are_chosen_by_columns(rows):
    assert rows.where(provider="fusednorm", cols=[1024, 4096]).get_numbers("of_copy") == numbers(
        "0.800", "0.900", "0.500"
    )
    assert rows.where(provider="fusednorm", sweep=1).get_numbers("of_copy") == numbers("0.800", "0.900")
    assert rows.where(provider="fusednorm").like(shape="1x.*").get_numbers("of_copy") == numbers("0.500")
    assert rows.where(provider="fusednorm").between("cols", 1024, 2048).get_numbers("of_copy") == numbers("0.800")
    assert rows.where(provider="torch").select_common(rows.where(sweep=0)).get_numbers("of_copy") == numbers(
        "0.625"
    )
    assert rows.join_values("provider") == "copy, fusednorm and torch"
    assert rows.where(sweep=0, provider="copy").join_values("provider") == "copy"


@pytest.mark.parametrize(
    "query",
    [
        lambda rows: rows.where(provider="none"),
        lambda rows: rows.like(shape="1"),
        lambda rows: rows.between("cols", 1, 2),
        lambda rows: rows.where(sweep=1).select_common(rows.where(sweep=0)),
        lambda rows: rows.compute_ratios("ms_p50", "fusednorm", "liger"),
        lambda rows: rows.select_slower("ms_p50", "copy", "fusednorm"),
    ],
)
def test_a_query_that_finds_nothing_is_an_error(rows, query):
    with pytest.raises(QueryError, match=r"run\.csv"):
        query(rows)


def test_a_column_that_is_not_there_is_an_error(rows):
    with pytest.raises(KeyError):
        rows.where(colour="red")


def test_ratios_are_of_cells_that_were_right_for_both(rows):
    assert rows.compute_ratios("of_copy", "fusednorm", "torch") == numbers("2", "0.8")
    assert [row["shape"] for row in rows.select_slower("ms_p50", "fusednorm", "torch").rows] == ["1x4096"]


def test_a_ratio_of_two_commits_is_an_error(rows):
    changed = tuple(row | {"commit": "def"} if row["provider"] == "torch" else row for row in rows.rows)
    with pytest.raises(QueryError, match=r"two commits in layer_norm forward plain 131072x1024"):
        figures.CsvRows("run.csv", changed).compute_ratios("of_copy", "fusednorm", "torch")


def test_what_is_appended_to_a_file_holds(write_csv, sweep_cell):
    cell = sweep_cell(1024)
    write_csv((cell, "torch", 0.5), (cell, "fusednorm", 0.6), (cell, "torch", 0.7))
    assert load_rows("run.csv").where(provider="torch").get_numbers("of_copy") == numbers("0.700")


def test_any_other_csv_is_read_as_it_stands(tmp_path):
    (tmp_path / "serve.csv").write_text("server,round,per_second\na,0,10\na,1,30\nb,0,5\nb,1,5\n", encoding="utf-8")
    rows = load_rows("serve.csv")
    assert rows.where(server="a").get_numbers("per_second") == numbers("10", "30")
    assert rows.compute_median_ratio("per_second", "server", "a", "b") == numbers("4")


def test_rows_are_chosen_by_a_number(tmp_path):
    (tmp_path / "cpu.csv").write_text("speed\n0.5\n1.000\n1.5\n", encoding="utf-8")
    rows = load_rows("cpu.csv")
    assert rows.above("speed", 1).get_numbers("speed") == numbers("1.5")
    with pytest.raises(QueryError, match=r"cpu\.csv"):
        rows.above("speed", 2)


def test_standing_counts_cells_by_the_best_peer(write_csv, sweep_cell):
    ahead, behind, alone = (sweep_cell(cols) for cols in (1024, 2048, 4096))
    write_csv(
        *((cell, provider, 0.8) for cell in (ahead, behind, alone) for provider in ("copy", "fusednorm")),
        *((ahead, "torch", 0.5), (ahead, "liger", 0.8), (behind, "torch", 0.6), (behind, "liger", 0.9)),
        (alone, "torch", "wrong"),
    )
    found = compare_with_peers(load_rows("run.csv"))
    assert (found.compared, found.lost, found.alone) == (2, 1, 1)
    assert found.ahead == numbers("0")
    assert found.behind == {"liger": numbers("0.1")}


def test_two_files_are_compared_where_both_have_ours(write_csv, sweep_cell):
    write_csv((sweep_cell(1024), "fusednorm", 0.8), (sweep_cell(2048), "fusednorm", 0.5), name="one.csv")
    write_csv((sweep_cell(1024), "fusednorm", 0.9), (sweep_cell(4096), "fusednorm", 0.5), name="other.csv")
    assert figures.compute_differences(load_rows("one.csv"), load_rows("other.csv")) == numbers("-0.1")
    with pytest.raises(QueryError, match="in common"):
        figures.compute_differences(load_rows("one.csv").where(cols=2048), load_rows("other.csv"))


def test_figures_are_written_as_on_paper():
    assert format_single(numbers("0.125")) == "0.13"
    assert format_single(numbers("0.00925"), 1, 1000) == "9.3"
    assert format_single(numbers("1234567"), 0) == "1,234,567"
    values = numbers("0.5", "0.9", "0.7")
    assert (format_minimum(values), format_median(values, 1), format_maximum(values, 3)) == ("0.50", "0.7", "0.900")
    assert (format_range(values), format_median_range(values)) == ("0.50 to 0.90", "0.70 (0.50 to 0.90)")
    level = numbers("0.501", "0.502")
    assert (format_range(level), format_median_range(level)) == ("0.50", "0.50")


@pytest.mark.parametrize(
    "shown", [format_single, format_median, format_minimum, format_maximum, format_range, format_median_range]
)
def test_no_value_is_no_figure(shown):
    with pytest.raises(QueryError):
        shown(())


def test_several_values_are_not_one():
    with pytest.raises(QueryError, match="not 2"):
        format_single(numbers("1", "2"))
