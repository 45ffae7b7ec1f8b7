"""What the commands say where something that they need is not installed, and that there is one version."""

import subprocess
import sys
from importlib import metadata

import normserve
import pytest

EXTRAS = {"normserve": "server", "normload": "load"}
ENTRIES = {"normserve": "normserve.cli.entry", "normload": "normload.command"}


def without(module: str, program: str) -> subprocess.CompletedProcess[str]:
    """A program in an interpreter that cannot import a module."""
    script = f"import sys\nsys.modules[{module!r}] = None\n{program}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("command", "missing", "arguments"),
    [
        ("normserve", "pydantic", ["serve"]),
        pytest.param("normserve", "uvicorn", ["serve", "--port", "0"], marks=pytest.mark.slow),
        ("normserve", "torch", ["serve", "--port", "0"]),
        ("normserve", "torch", ["serve", "--port", "0", "--frontends", "2"]),
        pytest.param("normserve", "fusednorm", ["serve", "--port", "0"], marks=pytest.mark.slow),
        ("normload", "rich", ["scenarios"]),
    ],
)
def test_a_missing_extra_is_one_line(command, missing, arguments):
    run = f"from {ENTRIES[command]} import main\nsys.exit(main({arguments!r}))"
    ended = without(missing, run)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line == f"{command}: {missing} is not installed: pip install 'normserve[{EXTRAS[command]}]'"


def test_a_gateway_without_grpc_is_one_line():
    ended = without("grpc", "from normserve.cli.entry import main\nsys.exit(main(['grpc']))")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == "normserve: grpc is not installed: pip install 'normserve[grpc]'\n"


def test_sighup_ends_no_command_whose_modules_are_still_imported():
    program = (
        "import importlib.abc, os, signal\n"
        "class Hangup(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "from normserve.cli.entry import main\n"
        "sys.meta_path.insert(0, Hangup())\n"
        "sys.exit(main(['version']))"
    )
    # A process ignores what its parent does.
    ended = subprocess.run(
        [sys.executable, "-c", f"import signal, sys\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n{program}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, f"normserve {normserve.__version__}\n"), ended.stderr


def test_a_fault_of_ones_own_is_no_missing_extra():
    ended = without("normserve.settings", "from normserve.cli.entry import main\nmain(['version'])")
    assert ended.returncode == 1
    assert "ModuleNotFoundError" in ended.stderr


def test_fusednorm_says_what_it_needs():
    blind = "import importlib.util\nimportlib.util.find_spec = lambda name: None\n"
    ended = without("torch", f"{blind}import fusednorm\nfusednorm.layer_norm")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: fusednorm.layer_norm needs torch: pip install fusednorm"
    )


def test_there_is_one_version():
    assert metadata.version("normserve") == normserve.__version__
