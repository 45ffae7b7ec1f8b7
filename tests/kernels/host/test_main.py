"""`python -m fusednorm.host`."""

import os
import subprocess
import sys

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


def test_the_status_is_that_of_a_process_that_makes_calls(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "FUSEDNORM_BUILD_EXTENSION": "0"}
    command = [sys.executable, "-m", "fusednorm.host", "--status"]
    status = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert status.endswith("by Python: the host extension is not compiled, and FUSEDNORM_BUILD_EXTENSION is 0\n")
