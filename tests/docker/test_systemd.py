"""The unit of systemd is valid, and what it says about the server is true of it."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from normserve.http.app import _STOP_S
from normserve.process.exit_codes import ExitCode
from normserve.process.owner_server import _FAREWELL_S, CLOSE_S
from normserve.settings import Settings

UNIT = Path(__file__).parents[2] / "docker/systemd/normserve.service"


@pytest.fixture(scope="module")
def service():
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT, encoding="utf-8")
    return parser["Service"]


def test_systemd_takes_it(tool, tmp_path):
    # Where the program is on the machine with the tests.
    text = UNIT.read_text(encoding="utf-8")
    assert text.count("ExecStart=/opt/normserve/bin/normserve serve\n") == 1
    (tmp_path / UNIT.name).write_text(
        text.replace("/opt/normserve/bin/normserve", f"{sys.executable} -m normserve"), encoding="utf-8"
    )
    command = [tool("systemd-analyze", package="systemd"), "verify", "--man=no", str(tmp_path / UNIT.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert UNIT.stem not in done.stderr


def test_it_ends_a_server_as_a_server_ends(service):
    assert service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > 5 + Settings().drain_s + _FAREWELL_S + CLOSE_S + _STOP_S


def test_a_reload_asks_the_first_process_alone(service):
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_what_is_configured_wrongly_is_not_started_again(service):
    assert service["Restart"] == "on-failure"
    assert int(service["RestartPreventExitStatus"]) == ExitCode.MISCONFIGURED


def test_it_may_write_where_the_settings_point(service):
    assert service["ProtectSystem"] == "strict"
    assert service["Environment"] == f"TRITON_CACHE_DIR=/var/cache/{service['CacheDirectory']}/triton"
    assert service["PrivateTmp"] == "true"
