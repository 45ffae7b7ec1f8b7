"""The build of the extension by another process: one at a time, at low priority, and never in anybody's way."""

import fcntl
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from fusednorm.host import background_build
from fusednorm.host.background_build import BackgroundBuild, ensure_extension_built, explain_absence
from fusednorm.host.extension_files import ExtensionFiles

from tests.kernels.harness.compiled import compile_elsewhere
from tests.kernels.host.test_extension_files import give_away

# Compilers: the last two arguments are -o and the file to write.
WRITING = [sys.executable, "-ISc", "import sys; open(sys.argv[-1], 'w').write('compiled')"]
FAILING = ["sh", "-c", "echo In file x.cpp: >&2; echo 'x.cpp:1: error: no such header' >&2; exit 1"]
KILLING = [sys.executable, "-ISc", "import os; os.kill(os.getppid(), 9)"]
ABSENT = ["no-such-compiler"]
FACTS = [
    sys.executable,
    "-ISc",
    "import json, os, sys\n"
    "about = {'nice': os.nice(0), 'session': os.getsid(0), 'folder': os.getcwd(),\n"
    "    'memory': int(open('/proc/self/oom_score_adj').read()),\n"
    "    'open': [os.readlink(f'/proc/{os.getppid()}/fd/{fd}') for fd in os.listdir(f'/proc/{os.getppid()}/fd')]}\n"
    "json.dump(about, open(sys.argv[-1], 'w'))",
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.delenv(background_build.SWITCH, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return ExtensionFiles()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger=background_build.__name__)
    return caplog


class Gate:
    """A compiler that runs until it is let through."""

    def __init__(self, path):
        self._path = path
        os.mkfifo(path)

    def command(self):
        wait = f"open({str(self._path)!r}).read(); "
        return [*WRITING[:-1], wait + WRITING[-1]]

    def open(self):
        """Returns once the compiler runs."""
        self._path.write_text("")


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


def wait_until_free(files):
    """Wait until no process compiles."""
    with files.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def build(files, command):
    """The build by a compiler, after its process has ended and this one has noticed."""
    made = BackgroundBuild(files, lambda: command)
    made.start_if_needed()
    if made._builder is not None:
        made._builder.wait()
    made.start_if_needed()
    return made


def test_the_extension_appears_whole_and_only_its_user_may_write_it(files):
    assert explain_absence(files).endswith("not compiled yet, which happens after the first launches on a GPU")
    files.folder.parent.mkdir()
    before = os.umask(0)
    try:
        made = build(files, WRITING)
    finally:
        os.umask(before)
    assert not made.is_running()
    assert files.find_compiled().read_text() == "compiled"
    assert sorted(path.name for path in files.folder.iterdir()) == sorted([files.compiled.name, "lock"])
    assert files.compiled.stat().st_mode & 0o777 == 0o644
    assert files.folder.stat().st_mode & 0o777 == 0o755


def test_the_builder_yields_to_everybody_and_holds_nothing_of_its_starter(files, tmp_path):
    with (tmp_path / "of-the-starter").open("w") as mine:
        os.set_inheritable(mine.fileno(), True)
        build(files, FACTS)
    about = json.loads(files.compiled.read_text())
    assert (about["nice"], about["memory"], about["folder"]) == (19, 1000, "/")
    assert about["session"] != os.getsid(0)
    others = {path for path in about["open"] if path != os.devnull and not path.startswith(("pipe:", "/proc/"))}
    assert others == {str(files.lock)}


def test_one_process_builds_and_the_others_find_its_result(files, gate):
    first, second = (BackgroundBuild(files, gate.command) for _ in range(2))
    first.start_if_needed()
    for _ in range(3):
        second.start_if_needed()
        first.start_if_needed()
    assert first.is_running()
    assert second._builder is None
    assert explain_absence(files) == "the host extension is being compiled"
    gate.open()
    wait_until_free(files)
    second.start_if_needed()
    assert second._builder is None
    assert files.find_compiled() == files.compiled
    first._builder.wait()


def test_a_process_ends_without_its_builder(files, gate):
    """Neither waits for the other's end: not by the processes, and not by what both have open."""
    script = (
        "from fusednorm.host.background_build import BackgroundBuild\n"
        "from fusednorm.host.extension_files import ExtensionFiles\n"
        f"build = BackgroundBuild(ExtensionFiles(), lambda: {gate.command()!r})\n"
        "build.start_if_needed()\n"
        "print(build.is_running())"
    )
    # It would not return while the builder had the pipes.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert explain_absence(files) == "the host extension is being compiled"
    gate.open()
    wait_until_free(files)
    assert files.find_compiled() == files.compiled


@pytest.mark.parametrize(
    ("command", "error"), [(FAILING, "x.cpp:1: error: no such header"), (ABSENT, "error: there is no compiler")]
)
def test_a_failure_is_said_once_and_tried_again_by_hand_alone(command, error, files, said):
    made = build(files, command)
    made.start_if_needed()
    ((_, level, message),) = said.record_tuples
    assert level == logging.WARNING
    assert f"the host extension does not compile ({error}" in message
    assert "run python -m fusednorm.host" in message
    assert message.endswith(explain_absence(files))
    said.clear()
    next_process = build(files, WRITING)
    assert next_process._builder is None
    assert [level for _, level, _ in said.record_tuples] == [logging.INFO]
    assert ensure_extension_built(files, lambda: WRITING) == files.find_compiled()
    assert files.read_failure() == ""


def test_a_failure_of_other_versions_says_nothing_of_these(files, monkeypatch):
    build(files, FAILING)
    monkeypatch.setattr("fusednorm.host.extension_files.compute_build_key", lambda: "another")
    others = ExtensionFiles()
    build(others, WRITING)
    assert others.find_compiled() is not None
    assert files.find_compiled() is None


def test_a_builder_that_is_killed_is_replaced_by_the_next_process(files, said):
    killed = build(files, KILLING)
    killed.start_if_needed()
    assert not killed.is_running()
    ((_, level, message),) = said.record_tuples
    assert level == logging.INFO
    assert "the next process starts another" in message
    build(files, WRITING)
    assert files.find_compiled() == files.compiled


def test_in_a_cache_that_cannot_be_written_to_nothing_is_tried_twice(monkeypatch, said):
    monkeypatch.delenv(background_build.SWITCH, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/no-folder-can-be-made-here")
    commands = []
    made = BackgroundBuild(ExtensionFiles(), lambda: commands.append(WRITING) or WRITING)
    for _ in range(3):
        made.start_if_needed()
    assert not commands
    assert [level for _, level, _ in said.record_tuples] == [logging.INFO]


def test_a_cache_that_cannot_be_written_to_is_named(files, monkeypatch):
    files.folder.parent.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK and path == files.folder.parent)
    reason = f"the host extension is not compiled, and {files.folder.parent} cannot be written to"
    assert explain_absence(files) == reason


@pytest.mark.parametrize("value", ["0", "false", "OFF", "no"])
def test_the_switch_turns_builds_off_and_not_their_results(value, files, monkeypatch, said):
    monkeypatch.setenv(background_build.SWITCH, value)
    assert BackgroundBuild(files, lambda: WRITING).start_if_needed() is None
    assert not files.folder.exists()
    assert not said.records
    assert explain_absence(files) == f"the host extension is not compiled, and FUSEDNORM_BUILD_EXTENSION is {value}"
    ensure_extension_built(files, lambda: WRITING)
    assert files.find_compiled() == files.compiled


@pytest.mark.parametrize("value", ["", "1", "true"])
def test_otherwise_builds_are_on(value, files, monkeypatch):
    monkeypatch.setenv(background_build.SWITCH, value)
    build(files, WRITING)
    assert files.find_compiled() == files.compiled


def test_nothing_is_built_where_others_may_write(files, monkeypatch, said):
    files.folder.mkdir(parents=True)
    give_away(files.folder, monkeypatch)
    made = BackgroundBuild(files, lambda: WRITING)
    for _ in range(2):
        made.start_if_needed()
    assert made._builder is None
    assert [level for _, level, _ in said.record_tuples] == [logging.INFO]
    with pytest.raises(PermissionError, match="set TRITON_CACHE_DIR to your own folder"):
        ensure_extension_built(files, lambda: WRITING)


def test_who_waits_gets_the_result_of_the_process_that_builds(files, gate, tmp_path):
    made = BackgroundBuild(files, gate.command)
    made.start_if_needed()
    os.mkfifo(pipe := tmp_path / "pipe")
    script = (
        "import json\n"
        "from fusednorm.host.background_build import ensure_extension_built\n"
        f"open({str(pipe)!r}, 'w').write('waits')\n"
        f"print(json.dumps(str(ensure_extension_built(compile_by=lambda: {ABSENT!r}))))"
    )
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(compile_elsewhere, script)
        assert pipe.read_text() == "waits"
        gate.open()
        assert waiting.result() == str(files.compiled)
    made._builder.wait()


def test_who_waits_is_told_the_compilers_errors(files):
    with pytest.raises(RuntimeError, match="no such header"):
        ensure_extension_built(files, lambda: FAILING)
    assert "no such header" in explain_absence(files)
    with pytest.raises(RuntimeError, match="there is no compiler no-such-compiler"):
        ensure_extension_built(files, lambda: ABSENT)


@pytest.mark.slow
def test_the_extension_itself_is_built_in_the_background(files):
    made = BackgroundBuild(files)
    made.start_if_needed()
    made._builder.wait()
    assert files.read_failure() == ""
    assert files.try_load_compiled_module().count_replays() == 0
