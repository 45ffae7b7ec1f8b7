"""Writes the fingerprints of this commit; `git diff` compares them with those of another.

    python -m benchmarks.fingerprints [launches] [sm_90] [--all] [--out FOLDER]
    python -m benchmarks.fingerprints show TEXT

Without names it writes both files, for specialisations that cover every value that a kernel branches on.  `--all`
uses every specialisation and a file of its own: `sm_90_all.txt` takes two hours of a core.  Code that the file
already has, from the same version of Triton and the same IR, is not compiled again.  `show` prints the launches of
the cases whose names contain a text, with arguments and options: what it prints at two commits says which differ.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from fusednorm.devices.device_properties import INTERPRETED

from benchmarks.fingerprints import files, group_norm_cases, layer_norm_cases
from benchmarks.fingerprints.cases import FingerprintCase, plan_case
from benchmarks.fingerprints.launch_text import format_case, summarise_launches
from benchmarks.fingerprints.machine_code import make_code_line, map_on_all_cores
from benchmarks.fingerprints.specialisations import list_distinct, select_covering

PARTS = ("launches", "sm_90")
_WRITTEN_EVERY = 50
"""Lines of code between writes: compiling takes long, and finished lines must not be lost."""


def main(arguments: list[str] | None = None) -> None:
    """Write the files, or show launches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fingerprints", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help="launches, sm_90; or show and a text")
    parser.add_argument("--all", action="store_true", help="take every specialisation, to files of their own")
    parser.add_argument("--out", type=Path, default=files.FOLDER, help="the folder of the files")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("kernels are compiled, so TRITON_INTERPRET must be unset")
    match options.parts:
        case ["show", text]:
            _print_launches(text)
        case parts if set(parts) <= set(PARTS):
            _write_files(parts or PARTS, options.out, options.all)
        case _:
            parser.error(f"the parts are {', '.join(PARTS)}")


def iterate_all_cases() -> Iterator[FingerprintCase]:
    """Every case of every operation."""
    return chain(layer_norm_cases.iterate_cases(), group_norm_cases.iterate_cases())


def _print_launches(text: str) -> None:
    for case in iterate_all_cases():
        if text in case.name:
            print(format_case(plan_case(case)))


def _write_files(parts: list[str] | tuple[str, ...], folder: Path, everything: bool) -> None:
    plans = list(map(plan_case, iterate_all_cases()))
    if "launches" in parts:
        files.write_fingerprints(folder / files.LAUNCHES, "# Kernels", summarise_launches(plans))
        print(f"launches: {len(plans)} cases, {sum(len(each.launches or ()) for each in plans)} launches")
    if "sm_90" in parts:
        specialisations = list_distinct(plans)
        chosen = specialisations if everything else select_covering(specialisations)
        print(f"sm_90: {len(chosen)} of {len(specialisations)} specialisations")
        path = folder / (files.SM_90_ALL if everything else files.SM_90)
        head, lines = files.read_fingerprints(path)
        if head != files.format_version():
            lines = {}
        known = {line.split()[0]: line for line in lines.values()}
        done: dict[str, str] = {}
        for label, line in map_on_all_cores(partial(make_code_line, known=known), chosen):
            done[label] = line
            if len(done) % _WRITTEN_EVERY == 0:
                files.write_fingerprints(path, files.format_version(), lines | done)
                print(f"{len(done)} of {len(chosen)}", file=sys.stderr)
        files.write_fingerprints(path, files.format_version(), done)


if __name__ == "__main__":
    main()
