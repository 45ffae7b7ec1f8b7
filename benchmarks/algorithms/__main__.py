"""Prints which shapes choose which algorithm, as tables in Markdown, or writes them into a page.

    python -m benchmarks.algorithms [--write docs/architecture-reference.md]

It needs no GPU and some ten seconds.  The exit status is 1 if no shape chooses some algorithm.
"""

import argparse
import sys
from pathlib import Path

from fusednorm.devices.device_properties import INTERPRETED

from benchmarks.algorithms.algorithm_page import AlgorithmPage, insert_tables


def main(arguments: list[str] | None = None) -> int:
    """Print or write the tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page that has the comments of `page`")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("programs of the interpreter cannot wait for one another, so TRITON_INTERPRET must be unset")
    page = AlgorithmPage()
    if options.write is None:
        print(page.text)
    else:
        before = options.write.read_text(encoding="utf-8")
        options.write.write_text(insert_tables(before, page.text), encoding="utf-8")
    for algorithm in page.unreached:
        print(f"no shape chooses {algorithm.pass_}.{algorithm.name}", file=sys.stderr)
    return 1 if page.unreached else 0


if __name__ == "__main__":
    sys.exit(main())
