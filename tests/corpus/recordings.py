"""The recorded observations: a file for each scene over each transport, laid out to be read as a diff."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recorded")
_ONE_LINE_EACH = frozenset({"metrics", "log"})


def path_of(scene: str, transport: str) -> Path:
    """Return the file of a recording."""
    return FOLDER / f"{scene}.{transport}.json".replace(" ", "_")


def read_recording(scene: str, transport: str) -> dict[str, Any]:
    """Read the observations of a scene, by the names of its steps."""
    content: dict[str, Any] = json.loads(path_of(scene, transport).read_text(encoding="utf-8"))
    return content


def write_recording(scene: str, transport: str, steps: dict[str, Any]) -> None:
    """Write the observations of a scene."""
    FOLDER.mkdir(exist_ok=True)
    path_of(scene, transport).write_text(_laid_out(steps, 2) + "\n", encoding="utf-8")


def _laid_out(value: Any, levels: int, indent: str = "") -> str:
    """Return JSON with a line for each entry of so many levels, and for each metric and line of a log."""
    if not levels or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + json.dumps(each) for each in value) + f"\n{indent}]"
    entries = (
        f"{inner}{json.dumps(name)}: {_laid_out(each, 1 if name in _ONE_LINE_EACH else levels - 1, inner)}"
        for name, each in value.items()
    )
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
