"""Counts and times of inferences, by model, of one process and of several."""

import pytest
from normserve.http.oip import inference_statistics as module
from normserve.http.oip.inference_statistics import InferenceStatistics, make_statistics_document
from normserve.jobs.job import NormResult


def result(batch_size: int) -> NormResult:
    return NormResult({}, 0.5, 0.25, 1.0, 0.125, 10, 10, batch_size, 0.0)


@pytest.fixture
def statistics():
    return InferenceStatistics(lambda: ["m"])


def of_model(*counted):
    (model,) = make_statistics_document(["m"], [each.to_dict() for each in counted])["model_stats"]
    return model


def test_inferences_that_share_a_launch_are_one_execution_and_each_waits_for_it(statistics):
    for _ in range(4):
        statistics.count_success("m", result(4), 3.0, 0.5)
    model = of_model(statistics)
    assert (model["inference_count"], model["execution_count"]) == (4, 1)
    assert model["last_inference"] > 1.7e12
    assert model["inference_stats"] == {
        "success": {"count": 4, "ns": 12 * 10**9},
        "fail": {"count": 0, "ns": 0},
        "queue": {"count": 4, "ns": 2 * 10**9},
        "compute_input": {"count": 4, "ns": 10**9},
        "compute_infer": {"count": 4, "ns": 4 * 10**9},
        "compute_output": {"count": 4, "ns": 2_500_000_000},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }


def test_counts_of_several_processes_are_added_and_the_last_is_the_latest(statistics):
    other = InferenceStatistics(lambda: ["m"])
    statistics.count_success("m", result(1), 1.0, 0.0)
    other.count_success("m", result(1), 2.0, 0.0)
    other.count_failure("m", 4.0)
    other.count_failure("another", 8.0)
    model = of_model(statistics, other, InferenceStatistics(lambda: []))
    assert (model["inference_count"], model["execution_count"]) == (2, 2)
    assert model["inference_stats"]["success"] == {"count": 2, "ns": 3 * 10**9}
    assert model["inference_stats"]["fail"] == {"count": 1, "ns": 4 * 10**9}
    assert model["last_inference"] == max(each.to_dict()["m"]["last_ms"] for each in (statistics, other))


def test_a_model_that_nothing_was_asked_of_has_zeros(statistics):
    model = of_model(statistics)
    assert (model["name"], model["inference_count"], model["last_inference"]) == ("m", 0, 0)


@pytest.fixture
def models():
    """The names of all models that exist."""
    return ["layer_norm"]


@pytest.fixture
def counted(models, monkeypatch):
    monkeypatch.setattr(module, "_MOST_REMOVED", 3)
    return InferenceStatistics(lambda: models)


def test_removed_models_are_forgotten_and_all_others_kept(counted, models):
    counted.count_failure("layer_norm", 1.0)
    for number in range(50):
        models.append(f"layer {number}")
        counted.count_failure(f"layer {number}", 1.0)
        models.pop()
    models += [f"kept {number}" for number in range(20)]
    for name in models[1:]:
        counted.count_failure(name, 1.0)
    kept = counted.to_dict()
    assert set(models) <= kept.keys()
    assert len(kept) <= len(models) + 3
    assert kept["layer_norm"]["counts"]["fail"] == 1
