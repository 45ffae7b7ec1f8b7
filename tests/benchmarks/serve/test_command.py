"""What the commands have in common: options of their own beside those of all, a CSV, a table, an exit code."""

import csv

from benchmarks.serve import command


def asked(tmp_path, *more):
    options = command.make_parser("the servers and of the callers")
    command.add_size_option(options)
    command.add_turn_options(options, "each caller", 1.5)
    return options.parse_args(["--out", str(tmp_path / "out.csv"), *more])


def test_options_have_what_all_commands_have(tmp_path):
    without = asked(tmp_path)
    assert (without.cores, without.size, without.rounds, without.seconds) == (({0}, {1}), None, 7, 1.5)
    given = asked(tmp_path, "--cores", "0-1", "2,4", "--size", "4 KiB", "--size", "16 MiB", "--rounds", "3")
    assert (given.cores, given.size, given.rounds) == ([{0, 1}, {2, 4}], ["4 KiB", "16 MiB"], 3)


def test_a_run_leaves_rows_a_table_and_whether_all_parts_went_well(tmp_path, capsys):
    def measure(results, folder, asked):
        (folder / "of a server").touch()
        results.add_row({"size": "4 KiB"})
        with results.run_part("one that fails"):
            raise RuntimeError("injected")

    options = asked(tmp_path)
    assert command.run_command(options, ("size",), measure, lambda rows: f"{len(rows)} rows") == 1
    assert capsys.readouterr().out.endswith("1 rows\n")
    (row,) = csv.DictReader(options.out.read_text().splitlines())
    assert row["size"] == "4 KiB"
    assert command.run_command(options, ("size",), lambda *_: None) == 0
