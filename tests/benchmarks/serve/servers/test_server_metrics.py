"""Means between two scrapes of what a server counts."""

from normserve.jobs.job import Batch, BatchResult
from normserve.metrics.metrics import Metrics
from normserve.metrics.request_metrics import RequestRecord

from benchmarks.serve.servers import server_metrics
from tests.service.jobs.fake_jobs import job


def samples(metrics: Metrics) -> dict[str, float]:
    return server_metrics.parse_samples(metrics.render().decode())


def test_requests_a_launch():
    metrics = Metrics()
    jobs = tuple(job(1, 4) for _ in range(6))
    metrics.observe_launch(Batch(jobs), BatchResult((), (), 0.0, 0.0, 0.0))
    before = samples(metrics)
    assert server_metrics.compute_requests_per_launch(before, before) == 0
    for batch in (jobs[:1], jobs[:5]):
        metrics.observe_launch(Batch(batch), BatchResult((), (), 0.0, 0.0, 0.0))
    assert server_metrics.compute_requests_per_launch(before, samples(metrics)) == 3


def test_stages():
    metrics = Metrics()
    before = samples(metrics)
    for seconds in (0.002, 0.004):
        metrics.observe_request(
            RequestRecord(op="layer_norm", direction="forward", stage_seconds={"recv": seconds})
        )
    after = samples(metrics)
    told = server_metrics.compute_stage_ms(before, after)
    assert told["recv"] == 3
    assert told["kernel"] == 0
    assert "recv 3.000" in server_metrics.format_stages(before, after)
