"""What a server says of itself at /metrics."""

import re
from collections.abc import Mapping

import httpx

_STAGES = ("recv", "parse", "queue", "copy_in", "kernel", "copy_out", "serialize", "send")
_SAMPLE = re.compile(r"^(normserve_\S+) (\S+)$", re.MULTILINE)


def parsed(text: str) -> dict[str, float]:
    """The samples of a scrape, by name and labels as they are written."""
    return {name: float(value) for name, value in _SAMPLE.findall(text)}


def samples(port: str) -> dict[str, float]:
    """The samples of a server on that port of this machine."""
    return parsed(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).raise_for_status().text)


def requests_a_launch(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """How many shared a launch between two scrapes, in the mean; 0 when nothing was launched."""
    return _mean(before, after, "normserve_batch_requests", "")


def stage_ms(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """How long a request was in each stage between two scrapes, in the mean."""
    name = "normserve_stage_duration_seconds"
    return {stage: 1000 * _mean(before, after, name, f'{{stage="{stage}"}}') for stage in _STAGES}


def stages_said(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The same for people."""
    return "stages, ms: " + ", ".join(f"{stage} {ms:.3f}" for stage, ms in stage_ms(before, after).items())


def _mean(before: Mapping[str, float], after: Mapping[str, float], name: str, labels: str) -> float:
    def grown(kind: str) -> float:
        key = f"{name}_{kind}{labels}"
        return after.get(key, 0.0) - before.get(key, 0.0)

    return grown("sum") / grown("count") if grown("count") else 0.0
