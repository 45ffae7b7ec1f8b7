"""The CSVs of `benchmarks/results`, as `results.toml` there declares them."""

import csv
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class ResultFile:
    """A CSV from which documents take figures.

    Attributes:
        name: its file name.
        on: the kind of machine.
        command: what measures it again, without `--out`.
        code: files and folders of the code whose speed it has, from the root of the repository.
        note: what was special about its run.
    """

    name: str
    on: str
    command: str
    code: tuple[str, ...]
    note: str = ""

    def read_commits(self) -> dict[str, bool]:
        """Read the commits of the rows, and of each whether a tree was dirty; "" is a commit that no row names."""
        found: dict[str, bool] = {}
        with (RESULTS / self.name).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                commit = row.get("commit") or ""
                found[commit] = found.get(commit, False) or row.get("dirty") == "1"
        return found

    def format_commits(self) -> str:
        """Format the commits for a table: "833ac6b with changes"."""
        return ", ".join(
            (commit or "unknown") + " with changes" * dirty for commit, dirty in self.read_commits().items()
        )


@cache
def load_result_files() -> dict[str, ResultFile]:
    """Load the declared files, by name."""
    table = tomllib.loads((RESULTS / "results.toml").read_text(encoding="utf-8"))
    files: dict[str, ResultFile] = {}
    for name, declared in table["files"].items():
        code = tuple(dict.fromkeys(path for group in declared.pop("code") for path in table["code"][group]))
        files[name] = ResultFile(name, code=code, **declared)
    return files


@cache
def load_history() -> dict[str, str]:
    """Load the CSVs that are the evidence of a decision: what was timed, by file name."""
    table = tomllib.loads((RESULTS / "results.toml").read_text(encoding="utf-8"))
    history: dict[str, str] = table["history"]
    return history
