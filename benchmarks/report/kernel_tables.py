"""Benchmarks' CSVs as Markdown tables: the fraction of a copy that each provider reaches.

    python -m benchmarks.report.kernel_tables benchmarks/results/plain.csv [more.csv ...] [--long | --over PROVIDER]

A table for each operation, pass and variant.  For each dtype it has ours and the best of the others with its name,
the better of the two in bold.  Ours is from the other's file, if the file has both.  With --long every provider has
a column.  Calls of the suite `host` are in microseconds, models in milliseconds with ours' speed over torch's.
With --over the tables have the speedup of ours over that provider, in the same file: for each operation, pass,
variant and layout the number of cells, and the cells with the least and the greatest speedup.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from itertools import groupby
from pathlib import Path

from benchmarks.harness import records
from benchmarks.harness.records import MODEL, OURS

PROVIDERS = (
    *(OURS, "fusednorm_python", "fusednorm_planned"),
    *("torch", "compile", "liger", "liger_cute", "quack", "helion", "helion_pretuned", "tutorial"),
)

Row = dict[str, str]


def format_tables(rows: Iterable[Row], long: bool = False) -> Iterator[str]:
    """Lines of Markdown, tables in the order of their first rows."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["op"] == MODEL:
            groups.setdefault((MODEL, row["pass"], row["variant"], MODEL), []).append(row)
            continue
        extent = "host" if not row["of_copy"] else "x of 256 MiB" if records.is_sweep_row(row) else "by shape"
        groups.setdefault((row["op"], row["pass"], row["variant"], extent), []).append(row)
    for (op, pass_, variant, extent), group in groups.items():
        if extent == MODEL:
            yield f"{pass_} of models, {variant}, in milliseconds\n"
            yield from _format_model_table(group)
        elif extent == "host":
            yield f"{op} {pass_}, {variant}, a call in microseconds\n"
            yield from _format_long_table(group, "us")
        else:
            copies = [int(row["gbps"]) for row in group if row["provider"] == "copy"]
            yield f"{op} {pass_}, {variant}, {extent}; a copy moves {min(copies)} to {max(copies)} GB/s\n"
            yield from _format_long_table(group, "of_copy") if long else _format_table(group)
        yield ""


def format_ratios(rows: Iterable[Row], provider: str) -> Iterator[str]:
    """Lines of Markdown: the speedup of ours over a provider, if the provider's file has both."""
    groups: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    for row in rows:
        if row["provider"] == provider and row["ours"]:
            times = float(row["ours"]) / float(row["of_copy"])
            key = (row["op"], row["pass"], row["variant"], row["layout"])
            groups.setdefault(key, []).append((times, f"{row['shape']} {row['dtype']}"))
    yield f"| operation | pass | variant | layout | cells | ours over {provider}, least | most |"
    yield "| --- " * 7 + "|"
    for group, found in groups.items():
        ends = [f"{times:.2f}, {cell}" for times, cell in (min(found), max(found))]
        yield f"| {' | '.join((*group, str(len(found)), *ends))} |"


def _format_table(rows: list[Row]) -> Iterator[str]:
    """A line for each row length or shape, two columns for each dtype and layout."""
    columns = list(dict.fromkeys(_make_column(row) for row in rows))
    lines: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        lines.setdefault(_make_label(row), {}).setdefault(_make_column(row), []).append(row)
    is_sweep = records.is_sweep_row(rows[0])
    yield f"| {'N' if is_sweep else 'shape'} | {' | '.join(f'{column} | best peer' for column in columns)} |"
    yield "| --- " * (1 + 2 * len(columns)) + "|"
    for label in sorted(lines, key=int) if is_sweep else lines:
        yield f"| {label} | {' | '.join(format_pair(lines[label].get(column, [])) for column in columns)} |"


def format_pair(rows: Sequence[Mapping[str, str]]) -> str:
    """Ours | the best of the others, both from the latter's file if that has ours."""
    ours = next((row["of_copy"] for row in rows if row["provider"] == OURS), None)
    peers = [row for row in rows if row["provider"] not in (OURS, "copy")]
    peer = max(peers, key=lambda row: float(row["of_copy"]), default=None)
    if peer and peer["ours"]:
        ours = peer["ours"]
    left = ours or "-"
    right = f"{peer['provider']} {peer['of_copy']}" if peer else "-"
    if ours and (peer is None or float(ours) >= float(peer["of_copy"])):
        left = f"**{left}**"
    elif peer:
        right = f"**{right}**"
    return f"{left} | {right}"


def _format_long_table(rows: list[Row], value: str) -> Iterator[str]:
    """A line for each cell, a column for each provider; the copy's own rate and our time beside fractions."""
    present = [p for p in PROVIDERS if any(row["provider"] == p for row in rows)]
    fractions = value == "of_copy"
    ends = ["copy GB/s", "us"] if fractions else []
    yield f"| shape | type | layout | {' | '.join(present + ends)} |"
    yield "| --- " * (3 + len(present + ends)) + "|"
    for cell, of_cell in groupby(rows, key=lambda row: (row["shape"], row["dtype"], row["layout"])):
        by_provider = {row["provider"]: row for row in of_cell}
        values = [
            "-"
            if p not in by_provider
            else by_provider[p]["of_copy"]
            if fractions
            else _format_microseconds(by_provider[p])
            for p in present
        ]
        if fractions:
            copy, ours = by_provider.get("copy"), by_provider.get(OURS)
            values += [copy["gbps"] if copy else "-", _format_microseconds(ours) if ours else "-"]
        yield f"| {' | '.join((*cell, *values))} |"


def _format_model_table(rows: list[Row]) -> Iterator[str]:
    """A line for each model and batch: milliseconds of each provider, and torch's over ours."""
    present = [p for p in PROVIDERS if any(row["provider"] == p for row in rows)]
    yield f"| model | batch | {' | '.join(present)} | speed over torch |"
    yield "| --- " * (3 + len(present)) + "|"
    models: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        models.setdefault((row["layout"], row["shape"]), {})[row["provider"]] = row["ms_p50"] or "wrong"
    for model, times in models.items():
        both = [times.get(OURS, "wrong"), times.get("torch", "wrong")]
        speed = "-" if "wrong" in both else f"{float(both[1]) / float(both[0]):.3f}"
        values = [_format_milliseconds(times[p]) if p in times else "-" for p in present]
        yield f"| {' | '.join((*model, *values, speed))} |"


def _format_milliseconds(time_ms: str) -> str:
    return time_ms if time_ms == "wrong" else f"{float(time_ms):.2f}"


def _make_label(row: Row) -> str:
    return row["shape"].split("x")[1] if records.is_sweep_row(row) else row["shape"]


def _make_column(row: Row) -> str:
    return row["dtype"] if row["layout"] == "rows" else f"{row['dtype']} {row['layout']}"


def _format_microseconds(row: Row) -> str:
    return str((Decimal(row["ms_p50"]) * 1000).quantize(Decimal("0.1"), ROUND_HALF_UP))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="+", type=Path)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--long", action="store_true", help="a column for each provider")
    form.add_argument("--over", metavar="PROVIDER", help="how many times as fast as that one ours is")
    arguments = parser.parse_args()
    rows = records.read_records(arguments.csv)
    print(
        *(format_ratios(rows, arguments.over) if arguments.over else format_tables(rows, arguments.long)), sep="\n"
    )


if __name__ == "__main__":
    main()
