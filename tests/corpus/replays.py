"""Replays of scenes, and what differs from what was recorded."""

import tempfile
import traceback
from pathlib import Path

from tests.corpus.observations import differences
from tests.corpus.recordings import read_recording
from tests.corpus.scenes import SCENES


def replay(scene: str, transport: str) -> list[str]:
    """Play a scene and return what differs from its recording, one line each, in plain words."""
    recorded = read_recording(scene, transport)
    found = []
    name = "the start"
    with tempfile.TemporaryDirectory() as folder:
        steps = SCENES[scene](transport, Path(folder))
        try:
            for name, observed in steps:
                found += differences(recorded.pop(name, {}), observed, name)
        except (AssertionError, OSError) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found.append(f"it stops after {name!r} with {type(error).__name__} in {last.name}: {error}")
    if recorded:
        found.append(f"steps that do not happen: {', '.join(recorded)}")
    return found
