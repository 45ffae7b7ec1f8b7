"""The command line of `python -m fusednorm.warm`."""

import re

import pytest
from fusednorm.warm import __main__ as warm


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "9.0"], "argument --arch: expected whole numbers of at least 1 .*, got '9.0'"),
        (["--arch", "90,"], "argument --arch: expected whole numbers of at least 1 .*, got '90,'"),
        (
            ["--arch", "90", "--lengths", "0"],
            "argument --lengths: expected whole numbers of at least 1 .*, got '0'",
        ),
        (["--arch", "90", "--jobs", "0"], "argument --jobs: expected a whole number of at least 1, got '0'"),
        (["--arch", "90", "--multiprocessors", "many"], "argument --multiprocessors: expected a whole number"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        warm.main(arguments)
    assert re.search(message, capsys.readouterr().err)
