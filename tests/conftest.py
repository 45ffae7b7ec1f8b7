"""Decides, before torch and kernels are imported, how threads wait and whether kernels run on a GPU."""

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import pytest

# OpenMP reads it when torch is imported.  Workers together have more threads than there are cores, and a thread
# that spins until the others of its operation are done takes a core from them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# With workers, this process tells what they report, and they start once it has read this file.
HAS_WORKERS = re.search(" --numprocesses [1-9]", " ".join(sys.argv)) is not None
RUNS_TESTS = not HAS_WORKERS or "PYTEST_XDIST_WORKER" in os.environ
if RUNS_TESTS:
    import torch

    # pytest puts its handlers on each logger that does not propagate, six times a test: torch has forty of these.
    # What they are given reaches pytest by way of the root.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True

# Where Hypothesis is missing, as on machines for `make test-gpu`, no test needs it.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # Examples take long on a busy machine.  Those that share a fixture leave it as it was.  Every run has others.
    settings.register_profile(
        "busy machine",
        max_examples=50,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("busy machine")

# No compiler starts in the middle of a test on a GPU, or of a server that it starts.
os.environ.setdefault("FUSEDNORM_BUILD_EXTENSION", "0")

# Without a GPU kernels run in Triton's interpreter.  Workers have a core or less, and tensors are small: a second
# thread costs time.  Servers, and tests of threads, have their own numbers.
if RUNS_TESTS and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


class Tools:
    """Programs that tests drive and that no Python package brings."""

    def __call__(self, name: str, package: str = "") -> str:
        """Where it is; without it the test is skipped, save in CI, which installs what it needs.

        Args: package: of Debian, if it has another name.
        """
        return shutil.which(name) or self.missing(f"apt-get install --no-install-recommends {package or name}")

    def missing(self, remedy: str) -> NoReturn:
        """Not here; how to get it."""
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"what this test drives is not installed: {remedy}")


@pytest.fixture(scope="session")
def tool() -> Tools:
    return Tools()


@pytest.fixture(scope="session")
def kserve_python() -> str:
    """An interpreter that has KServe's package, which cannot be installed beside this project's pins."""
    found = os.environ.get("KSERVE_PYTHON")
    if found is None:
        pytest.skip("KSERVE_PYTHON names no interpreter that has the package kserve: make test-kserve makes one")
    return found


@pytest.fixture(scope="session")
def interpreter() -> Iterator[None]:
    """Triton's interpreter runs the kernels of a GPU, where there is none."""
    from triton import knobs

    with pytest.MonkeyPatch.context() as patch:
        if knobs.runtime.interpret:
            from tests.interpreter import change

            change(patch)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """An exception in a callback of an event loop fails the test that runs; asyncio alone would only log it."""
    told: list[str] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        told.append(f"{context.get('message')}: {context.get('exception')!r}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "call_exception_handler", note)
        result = yield
    assert not told, told
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Memory of the GPU that torch keeps for later tests of one process is missing in the others' tests."""
    try:
        return (yield)
    finally:
        if item.get_closest_marker("gpu"):
            torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected stays to the end, so the garbage collector need never look through it."""
    gc.disable()
    try:
        if hasattr(session.config, "workerinput"):
            _import_by_turns(session)
        return (yield)
    finally:
        gc.freeze()
        # The interpreter makes thousands of objects for each kernel, hardly one of which is part of a cycle.
        gc.set_threshold(20_000)
        gc.enable()


def _import_by_turns(session: pytest.Session) -> None:
    """Import the modules of tests, each worker of xdist from another one on.

    pytest takes eight seconds to rewrite the assertions of all of them, and writes down what it makes.  Where
    nothing is written yet, as in a fresh clone, each worker so rewrites a part and reads the others' parts.
    """
    given = session.config.workerinput  # type: ignore[attr-defined]
    roots = [(session.config.invocation_params.dir / name.split("::")[0]).resolve() for name in session.config.args]
    files = sorted({file for root in roots for file in ([root] if root.is_file() else root.rglob("test_*.py"))})
    first = len(files) * int(given["workerid"].removeprefix("gw")) // given["workercount"]
    for file in files[first:] + files[:first]:
        name = ".".join(file.relative_to(session.config.rootpath).with_suffix("").parts)
        # What fails, or wants to be skipped, does so again when it is collected, and is reported then.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


@pytest.fixture(scope="module", autouse=True)
def freeze_what_stays() -> Iterator[None]:
    """Spare later modules what this one has imported: some have garbage collected hundreds of times."""
    yield
    gc.collect()
    gc.freeze()


_LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests that need one are left out of the run."""
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[_LEFT_OUT] = len(needs_gpu)
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects the same tests."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report how many tests a machine without a GPU leaves out, and why tests have been run once more."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"passed or failed once more: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
    if left_out := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} tests that need a GPU were left out; `make test-gpu` runs them")
