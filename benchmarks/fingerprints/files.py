"""The files of fingerprints: a line for each name, sorted, below the version of Triton that made them."""

from collections.abc import Mapping
from pathlib import Path

import triton

FOLDER = Path(__file__).parents[1] / "results" / "fingerprints"
LAUNCHES = "launches.txt"
SM_90, SM_90_ALL = "sm_90.txt", "sm_90_all.txt"


def format_version() -> str:
    """The head of a file whose hashes depend on Triton."""
    return f"# Triton {triton.__version__}"


def read_fingerprints(path: Path) -> tuple[str, dict[str, str]]:
    """A file's head, and its lines by name; both empty if there is no such file."""
    if not path.exists():
        return "", {}
    head, *lines = path.read_text().splitlines()
    return head, dict(line.split(": ", 1) for line in lines)


def write_fingerprints(path: Path, head: str, said: Mapping[str, str]) -> None:
    """Replace the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{name}: {what}" for name, what in sorted(said.items()))
    path.write_text("\n".join((head, *lines, "")))
