"""Lists the CSVs from which documents take figures, with the lines of their code that changed since the run.

    python -m benchmarks.report.stale_results

The exit code is 1 if a CSV is to be measured again: more than MOST_LINES changed, or its rows do not say of which
commit they are, or are of a tree with changes.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report.result_files import load_result_files

ROOT = Path(__file__).parents[2]

MOST_LINES = 1000
"""A choice: of all changes since a run; nineteen of twenty commits change fewer lines of code each."""


def count_changed_lines(commit: str, code: Iterable[str]) -> int | None:
    """Count the lines of code that are not as they were at a commit; None if git does not know the commit.

    A line that was replaced counts once.  A file that was moved from elsewhere is new.
    """
    asked = ["git", "diff", "--numstat", f"{commit}..HEAD", "--", *code]
    answer = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return None
    counts = [line.split("\t")[:2] for line in answer.stdout.splitlines()]
    return sum(max(int(added), int(deleted)) for added, deleted in counts if added != "-")


def judge_run(commit: str, is_dirty: bool, code: Iterable[str]) -> tuple[str, bool]:
    """Judge rows of one commit: what to say of them, and whether they hold."""
    if not commit:
        return "no commit", False
    lines = count_changed_lines(commit, code)
    if lines is None:
        return f"{commit}, which git does not know", False
    if is_dirty:
        return f"{commit} with changes, {lines:,} lines", False
    return f"{commit}, {lines:,} lines", lines <= MOST_LINES


def main() -> int:
    """Print a line for each file and commit; return the exit code."""
    stale: set[str] = set()
    files = load_result_files()
    for name, file in files.items():
        for commit, is_dirty in file.read_commits().items():
            text, holds = judge_run(commit, is_dirty, file.code)
            print(f"{'ok   ' if holds else 'STALE'} {name}: {text}")
            if not holds:
                stale.add(name)
    print(f"{len(stale)} of {len(files)} files are to be measured again; at most {MOST_LINES:,} lines may change")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
