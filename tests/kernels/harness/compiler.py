"""Runs each program that it is told in a process forked from this one, which has imported torch and Triton.

It has also taken the hash of all of Triton, which a process takes before it compiles, and remembers.
"""

import json
import os
import sys
import tempfile
import traceback

# Imported for the processes that are forked.
import torch  # noqa: F401
from triton.runtime.cache import triton_key


def _run(program: str, arguments: list[str], environment: dict[str, str]) -> int:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _answer(line: str) -> tuple[int, str, str]:
    """The exit code of what the line tells, and what that wrote to either stream."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(error.fileno(), 2)
            code = _run(*json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for stream in (out, error):
            stream.seek(0)
        return code, out.read().decode(), error.read().decode()


if __name__ == "__main__":
    triton_key()
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)
