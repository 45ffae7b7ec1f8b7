"""Counts and times of each model's inferences, for the protocol's statistics extension."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from normserve.http.oip.models import VERSION
from normserve.jobs.job import NormResult

# Names of models include those of layers, which are registered and removed: so many of removed ones may be kept.
_MOST_REMOVED = 1024
_STAGES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
# Results are never kept for the next request.
_NEVER = ("cache_hit", "cache_miss")


@dataclass(slots=True)
class ModelStatistics:
    """The statistics of one model.

    Attributes:
        launches: each of n requests that share a launch counts as 1/n.
        last_ms: when the last one ended, in milliseconds since 1970; 0 before the first.
        counts, seconds: by stage.
    """

    launches: float = 0.0
    last_ms: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0.0))

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the counts of another process."""
        self.launches += other["launches"]
        self.last_ms = max(self.last_ms, other["last_ms"])
        for stage in _STAGES:
            self.counts[stage] += other["counts"][stage]
            self.seconds[stage] += other["seconds"][stage]

    def plain(self) -> dict[str, Any]:
        """The counts in the form that `add` takes."""
        return {"launches": self.launches, "last_ms": self.last_ms, "counts": self.counts, "seconds": self.seconds}


class InferenceStatistics:
    """Counts the inferences of one process."""

    def __init__(self, models: Callable[[], Iterable[str]]) -> None:
        """Args: models: the names of all models that exist."""
        self._models = models
        self._tallies: dict[str, ModelStatistics] = {}
        self._most = _MOST_REMOVED

    def note_success(self, model: str, result: NormResult, seconds: float, output_s: float) -> None:
        """Count an inference that was computed.

        Args:
            seconds: from its header to its response.
            output_s: time to serialise the response.
        """
        tally = self._tally(model)
        tally.launches += 1 / max(1, result.batch_size)
        tally.last_ms = time.time_ns() // 1_000_000
        for stage, took in (
            ("success", seconds),
            ("queue", result.queue_s),
            ("compute_input", result.copy_in_s),
            ("compute_infer", result.kernel_s),
            ("compute_output", result.copy_out_s + output_s),
        ):
            tally.counts[stage] += 1
            tally.seconds[stage] += took

    def note_failure(self, model: str, seconds: float) -> None:
        """Count an inference that was refused or failed."""
        tally = self._tally(model)
        tally.counts["fail"] += 1
        tally.seconds["fail"] += seconds

    def plain(self) -> dict[str, Any]:
        """All counts, for another process to add."""
        return {name: tally.plain() for name, tally in self._tallies.items()}

    def _tally(self, model: str) -> ModelStatistics:
        tally = self._tallies.get(model)
        if tally is None:
            if len(self._tallies) >= self._most:
                self._forget_removed()
            tally = self._tallies[model] = ModelStatistics()
        return tally

    def _forget_removed(self) -> None:
        """Forget the statistics of models that do not exist any more."""
        existing = set(self._models())
        self._tallies = {name: tally for name, tally in self._tallies.items() if name in existing}
        self._most = len(self._tallies) + _MOST_REMOVED


def make_document(models: Iterable[str], counted: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of models in the protocol's form.

    Args: counted: the counts of each process, from `InferenceStatistics.plain`.
    """
    counted = list(counted)
    return {
        "model_stats": [
            _make_model_document(name, [each[name] for each in counted if name in each]) for name in models
        ]
    }


def _make_model_document(name: str, tallies: list[Mapping[str, Any]]) -> dict[str, Any]:
    total = ModelStatistics()
    for tally in tallies:
        total.add(tally)
    durations = {
        stage: {"count": total.counts[stage], "ns": round(total.seconds[stage] * 1e9)} for stage in _STAGES
    }
    return {
        "name": name,
        "version": VERSION,
        "last_inference": total.last_ms,
        "inference_count": total.counts["success"],
        "execution_count": round(total.launches),
        "inference_stats": durations | {stage: {"count": 0, "ns": 0} for stage in _NEVER},
        "batch_stats": [],
    }
