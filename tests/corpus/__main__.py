"""`python -m tests.corpus record|replay [WORD …]`: record scenes, or compare them with what is recorded."""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.corpus.recordings import write_recording
from tests.corpus.replays import replay
from tests.corpus.scenes import RECORDED, SCENES

Result = list[str]


def record(scene: str, transport: str) -> Result:
    """Record a scene; nothing is found wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        write_recording(scene, transport, dict(SCENES[scene](transport, Path(folder))))
    return []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("action", choices=["record", "replay"])
    parser.add_argument("words", nargs="*", help="only scenes and transports that contain all of these")
    parser.add_argument("--jobs", type=int, default=3, help="scenes at the same time")
    arguments = parser.parse_intermixed_args()
    action: Callable[[str, str], Result] = record if arguments.action == "record" else replay
    chosen = [each for each in RECORDED if all(word in ", ".join(each) for word in arguments.words)]
    if not chosen:
        parser.error(f"no scene and transport contain all of {' '.join(arguments.words)}")
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = [(each, pool.submit(action, *each)) for each in chosen]
        for (scene, transport), future in futures:
            try:
                found = future.result()
            except Exception:
                found = traceback.format_exc().splitlines()
            failed += bool(found)
            print(f"{scene} over {transport}: {f'{len(found)} differences' if found else arguments.action + 'ed'}")
            for line in found:
                print(f"    {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
