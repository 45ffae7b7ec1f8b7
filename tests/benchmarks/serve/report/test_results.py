"""What a run found is on disk as soon as it is found, whatever becomes of the rest."""

import csv

from benchmarks.serve.report.results import CsvResults


def test_a_part_that_fails_costs_no_other(tmp_path, capsys):
    results = CsvResults(tmp_path / "a.csv", ("size", "rate"))
    with results.run_part("first"):
        results.add_row({"size": 1, "rate": 2})
        assert not results.exit_code
        raise RuntimeError("no such device")
    with results.run_part("second"):
        results.add_row({"size": 3, "rate": 4})
    assert results.exit_code == 1
    said = capsys.readouterr().out
    assert "first failed" in said
    assert "no such device" in said
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["size"], row["rate"]) for row in rows] == [("1", "2"), ("3", "4")]
    assert rows[0]["torch"]


def test_rows_are_written_at_once(tmp_path):
    results = CsvResults(tmp_path / "a.csv", ("size",))
    results.add_row({"size": 7})
    assert (tmp_path / "a.csv").read_text().rstrip().endswith(",7")
