"""The programs in C, compiled when they are needed."""

import subprocess
from pathlib import Path

_SOURCES = Path(__file__).parent


def compile_program(folder: Path, name: str) -> Path:
    """The program made from `name`.c, in the folder."""
    program = folder / name
    flags = ("-O2", "-Wall", "-Wextra", "-pthread")
    subprocess.run(["gcc", *flags, "-o", str(program), str(_SOURCES / f"{name}.c")], check=True)
    return program
