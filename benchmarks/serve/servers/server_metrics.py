"""The metrics of a server, from /metrics."""

import re
from collections.abc import Mapping

import httpx
from normserve.metrics.request_metrics import STAGES

_SAMPLE = re.compile(r"^(normserve_\S+) (\S+)$", re.MULTILINE)


def parse_samples(text: str) -> dict[str, float]:
    """The samples of a scrape, by the text of name and labels."""
    return {name: float(value) for name, value in _SAMPLE.findall(text)}


def fetch_samples(port: str) -> dict[str, float]:
    """The samples of a server on that port of this machine."""
    return parse_samples(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).raise_for_status().text)


def compute_requests_per_launch(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Mean number of requests per launch between two scrapes; 0 without launches."""
    return _compute_mean(before, after, "normserve_batch_requests", "")


def compute_stage_ms(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Mean milliseconds of a request in each stage between two scrapes."""
    name = "normserve_stage_duration_seconds"
    return {stage: 1000 * _compute_mean(before, after, name, f'{{stage="{stage}"}}') for stage in STAGES}


def format_stages(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The result of `compute_stage_ms` as text."""
    return "stages, ms: " + ", ".join(f"{stage} {ms:.3f}" for stage, ms in compute_stage_ms(before, after).items())


def _compute_mean(before: Mapping[str, float], after: Mapping[str, float], name: str, labels: str) -> float:
    def compute_growth(kind: str) -> float:
        key = f"{name}_{kind}{labels}"
        return after.get(key, 0.0) - before.get(key, 0.0)

    return compute_growth("sum") / compute_growth("count") if compute_growth("count") else 0.0
