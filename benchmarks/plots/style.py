"""The style of plots: colours for each provider, and small files."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

STYLES: dict[str, dict[str, Any]] = {
    "copy": {"color": "0.35", "linestyle": "--", "linewidth": 1.2},
    "fusednorm": {"color": "#c1272d", "marker": "o", "linewidth": 2.2, "zorder": 3},
    "fusednorm_python": {"color": "#e7868a", "marker": "p"},
    "fusednorm_planned": {"color": "#f4c7c3", "marker": "h"},
    "torch": {"color": "#e08214", "marker": "s"},
    "compile": {"color": "#35978f", "marker": "^"},
    "liger": {"color": "#2166ac", "marker": "v"},
    "liger_cute": {"color": "#92c5de", "marker": "<"},
    "quack": {"color": "#762a83", "marker": "D"},
    "helion": {"color": "#1b7837", "marker": "*"},
    "helion_pretuned": {"color": "#7fbf7b", "marker": "P"},
    "tutorial": {"color": "#7f6a3f", "marker": "x"},
}


def describe_machine(rows: Sequence[Mapping[str, str]]) -> str:
    """The hardware and software of a run's rows."""
    return f"{rows[0]['gpu']}, torch {rows[0]['torch']}, Triton {rows[0]['triton']}"


def save_png(figure: Any, path: Path) -> None:
    """Save as a PNG with few colours, which has a third of the size."""
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, dpi=100)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)
