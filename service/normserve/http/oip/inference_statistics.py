"""Counts and times of each model's inferences, for the protocol's statistics extension."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from normserve.http.oip.models import VERSION
from normserve.jobs.job import NormResult

# Limit of kept statistics of removed models, since layers, which are models, are registered and removed.
_MOST_REMOVED = 1024
_STAGES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
# Results are never kept for the next request.
_NEVER = ("cache_hit", "cache_miss")


@dataclass(slots=True)
class ModelStatistics:
    """The number of a model's inferences, and the seconds that they spent in each stage.

    Attributes:
        launches: each of n requests that share a launch counts as 1/n.
        last_ms: when the last inference ended, in milliseconds since 1970; 0 before the first.
        counts, seconds: number of inferences and their seconds, by stage.
    """

    launches: float = 0.0
    last_ms: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0.0))

    def add_counts(self, other: Mapping[str, Any]) -> None:
        """Add the counts of the same model in another process.

        Args: other: the counts, from `to_dict`.
        """
        self.launches += other["launches"]
        self.last_ms = max(self.last_ms, other["last_ms"])
        for stage in _STAGES:
            self.counts[stage] += other["counts"][stage]
            self.seconds[stage] += other["seconds"][stage]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts in the form that `add_counts` takes."""
        return {"launches": self.launches, "last_ms": self.last_ms, "counts": self.counts, "seconds": self.seconds}


class InferenceStatistics:
    """The statistics of the inferences of each model in this process."""

    def __init__(self, models: Callable[[], Iterable[str]]) -> None:
        """Args: models: the names of all models that exist."""
        self._list_model_names = models
        self._by_model: dict[str, ModelStatistics] = {}
        self._max_models = _MOST_REMOVED

    def count_success(self, model: str, result: NormResult, total_s: float, output_s: float) -> None:
        """Count an inference that was computed.

        Args:
            total_s: from its header to its response.
            output_s: time to serialise the response.
        """
        tally = self._get_or_create_statistics(model)
        tally.launches += 1 / max(1, result.batch_size)
        tally.last_ms = time.time_ns() // 1_000_000
        for stage, took in (
            ("success", total_s),
            ("queue", result.queue_s),
            ("compute_input", result.copy_in_s),
            ("compute_infer", result.kernel_s),
            ("compute_output", result.copy_out_s + output_s),
        ):
            tally.counts[stage] += 1
            tally.seconds[stage] += took

    def count_failure(self, model: str, total_s: float) -> None:
        """Count an inference that was refused or failed."""
        tally = self._get_or_create_statistics(model)
        tally.counts["fail"] += 1
        tally.seconds["fail"] += total_s

    def to_dict(self) -> dict[str, Any]:
        """Return all counts, for another process to add."""
        return {name: tally.to_dict() for name, tally in self._by_model.items()}

    def _get_or_create_statistics(self, model: str) -> ModelStatistics:
        """Return the statistics of a model, which are created at its first inference.

        If many are kept, the statistics of removed models are deleted first.
        """
        tally = self._by_model.get(model)
        if tally is None:
            if len(self._by_model) >= self._max_models:
                self._remove_deleted_models()
            tally = self._by_model[model] = ModelStatistics()
        return tally

    def _remove_deleted_models(self) -> None:
        """Delete the statistics of models that no longer exist."""
        existing = set(self._list_model_names())
        self._by_model = {name: tally for name, tally in self._by_model.items() if name in existing}
        self._max_models = len(self._by_model) + _MOST_REMOVED


def make_statistics_document(models: Iterable[str], counted: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add the counts of all processes, and format the statistics of these models in the protocol's form.

    Args: counted: the counts of each process, from `InferenceStatistics.to_dict`.
    """
    counted = list(counted)
    return {
        "model_stats": [
            _make_model_document(name, [each[name] for each in counted if name in each]) for name in models
        ]
    }


def _make_model_document(name: str, tallies: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Add the counts of one model in all processes, and format them in the protocol's form.

    Args: tallies: the model's counts in each process, from `ModelStatistics.to_dict`.
    """
    total = ModelStatistics()
    for tally in tallies:
        total.add_counts(tally)
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
