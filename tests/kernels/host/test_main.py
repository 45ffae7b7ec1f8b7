"""`python -m fusednorm.host`."""

import pytest
from fusednorm.host import __main__ as program
from fusednorm.host.background_build import ensure_extension_built
from fusednorm.launch.call_status import describe_repeated_calls


def test_it_prints_where_the_extension_is(host_extension, capsys):
    program.main([])
    assert capsys.readouterr().out == f"{ensure_extension_built()}\n"


def test_the_status_is_said_and_nothing_is_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "ensure_extension_built", lambda: pytest.fail("compiled"))
    program.main(["--status"])
    assert capsys.readouterr().out == f"{describe_repeated_calls()}\n"
