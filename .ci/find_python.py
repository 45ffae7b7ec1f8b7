"""Finds interpreters of other versions, on PATH or of pyenv.

Usage: find_python.py    prints one for JAX; exit status 1 if there is none
"""

import shutil
import subprocess
import sys
from pathlib import Path

JAX_VERSIONS = ("3.12", "3.13")
"""Versions of Python for the extra `jax`, which needs a newer one than the others do."""


def find_python(*versions: str) -> Path | None:
    """Return an interpreter of the first version that has one which starts; None if there is none."""
    for version in versions:
        pyenv = Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")
        for python in (shutil.which(f"python{version}"), *map(str, pyenv)):
            if python and subprocess.run([python, "--version"], capture_output=True).returncode == 0:
                return Path(python)
    return None


if __name__ == "__main__":
    found = find_python(*JAX_VERSIONS)
    if found is None:
        sys.exit(1)
    print(found)
