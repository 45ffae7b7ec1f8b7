"""The autoscaler asks for metrics that the adapter offers, and they are what it means."""

import json
import re

import yaml

from tests.docker.k8s.conftest import K8S, run
from tests.docker.k8s.quantities import GIB, nbytes


def adapter_rules():
    rules = yaml.safe_load((K8S / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    series = [re.match(r"\w+", rule["seriesQuery"])[0] for rule in rules]
    return {rule.get("name", {}).get("as", name): (name, rule) for name, rule in zip(series, rules, strict=True)}


def test_autoscaler_alone_says_how_many(manifests):
    autoscaler = manifests["HorizontalPodAutoscaler"]["spec"]
    assert "replicas" not in manifests["Deployment"]["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == manifests["Deployment"]["metadata"]["name"]


def test_autoscaler_asks_for_what_the_adapter_offers(manifests, settings):
    targets = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for metric in manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    assert targets.keys() == adapter_rules().keys()
    # Before requests are turned away for their number or their bytes.
    assert nbytes(targets["normserve_inflight_bytes"]) == settings.max_inflight_bytes // 2
    assert int(targets["normserve_waiting_requests"]) < settings.max_inflight_requests // 2


def test_adapter_computes_what_the_autoscaler_means(tool, tmp_path):
    """Three requests that wait all the time, in a fleet of two processes, and 1 and 3 GiB inside in turn."""
    labels = 'namespace="n",pod="p"'
    asked = {
        name: rule["metricsQuery"]
        .replace("<<.Series>>", series)
        .replace("<<.LabelMatchers>>", 'namespace="n",pod=~"p|q"')
        .replace("<<.GroupBy>>", "pod")
        for name, (series, rule) in adapter_rules().items()
    }
    queue = "normserve_stage_duration_seconds_sum"
    values = {
        f'{queue}{{{labels},process="0",stage="queue"}}': "0+5x120",
        f'{queue}{{{labels},process="1",stage="queue"}}': "0+10x120",
        f'{queue}{{{labels},process="0",stage="send"}}': "0+50x120",
        f'{queue}{{namespace="other",pod="p",stage="queue"}}': "0+50x120",
        f'normserve_inflight_bytes{{{labels},process="0"}}': f"{GIB} {3 * GIB} " * 60,
    }
    means = {"normserve_waiting_requests": 3, "normserve_inflight_bytes": 2 * GIB}
    test = {
        "interval": "5s",
        "input_series": [{"series": series, "values": value} for series, value in values.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "4m57s", "exp_samples": [{"labels": '{pod="p"}', "value": means[name]}]}
            for name, query in asked.items()
        ],
    }
    (tmp_path / "adapter.yml").write_text(
        json.dumps({"evaluation_interval": "1s", "tests": [test]}), encoding="utf-8"
    )
    run(tool("promtool", package="prometheus"), "test", "rules", str(tmp_path / "adapter.yml"))
