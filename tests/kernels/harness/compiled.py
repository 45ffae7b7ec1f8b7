"""Compiling launches for a GPU that is not there: the interpreter replaces Triton's compiler in this process."""

import atexit
import functools
import json
import os
import subprocess
import sys
from typing import Any


def compile_elsewhere(script: str, *arguments: str) -> Any:
    """What `script`, run in a process of its own with Triton's compiler, prints as JSON."""
    compiler = _compiler()
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    print(json.dumps([script, arguments, _environment()]), file=compiler.stdin, flush=True)
    try:
        code, out, error = json.loads(compiler.stdout.readline())
    except BaseException:
        # A test that ran out of time has read no answer, which the next test would take for its own.
        compiler.kill()
        _compiler.cache_clear()
        raise
    assert code == 0, error
    return json.loads(out)


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """Forks those processes, so that torch and Triton are imported once."""
    command = [sys.executable, "-m", f"{__package__}.compiler"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    compiler = subprocess.Popen(command, env=_environment(), text=True, **pipes)
    atexit.register(compiler.communicate)
    return compiler


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
