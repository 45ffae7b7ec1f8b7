"""Replays of scenes, and what differs from what was recorded."""

import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.corpus.observations import differences
from tests.corpus.recordings import read_recording
from tests.corpus.scenes import SCENES

_TIMES = re.compile(r"(\d+) times: ")


def replay(scene: str, transport: str) -> list[str]:
    """Play a scene and return what differs from its recording, one line each, in plain words."""
    recorded = read_recording(scene, transport)
    found = []
    recorded_events, events = count_events(recorded.values()), Counter[str]()
    name = "the start"
    with tempfile.TemporaryDirectory() as folder:
        steps = SCENES[scene](transport, Path(folder))
        try:
            for name, observed in steps:
                events += count_events([observed])
                found += differences(_without_log(recorded.pop(name, {})), _without_log(observed), name)
        except (AssertionError, OSError) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found.append(f"it stops after {name!r} with {type(error).__name__} in {last.name}: {error}")
    if recorded:
        found.append(f"steps that do not happen: {', '.join(recorded)}")
    found += [f"log: {count} fewer: {event}" for event, count in sorted((recorded_events - events).items())]
    found += [f"log: {count} more: {event}" for event, count in sorted((events - recorded_events).items())]
    return found


def count_events(steps: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Count the events in the logs of all steps: a line may arrive while the next step is made."""
    counted = Counter[str]()
    for step in steps:
        for line in step.get("log", ()):
            times = _TIMES.match(line)
            counted[line[times.end() :] if times else line] += int(times[1]) if times else 1
    return counted


def _without_log(step: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "log"}
