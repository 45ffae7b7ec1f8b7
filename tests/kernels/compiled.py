"""Compiling launches for a GPU that is not there: the interpreter replaces Triton's compiler in this process."""

import json
import os
import subprocess
import sys
from typing import Any


def compile_elsewhere(script: str, *arguments: str) -> Any:
    """What `script`, run in a process of its own with Triton's compiler, prints as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
