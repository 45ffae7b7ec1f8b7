"""A server answers the probes of docker/k8s, and its scrape, as the Deployment means them."""

import re
from pathlib import Path

import yaml

from tests.integration.harness.servers import find_free_port, is_up
from tests.integration.harness.stage import SCRIPT

K8S = Path(__file__).parents[3] / "docker/k8s"
DEPLOYMENT = yaml.safe_load((K8S / "base/deployment.yaml").read_text(encoding="utf-8"))
MONITOR = yaml.safe_load((K8S / "base/service-monitor.yaml").read_text(encoding="utf-8"))
(CONTAINER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
(SCRAPE,) = MONITOR["spec"]["endpoints"]
# Neither the kubelet nor Prometheus has the key.
KEY = ("--api-key", "secret")


def passing(http):
    """The probes that a kubelet would find successful."""
    probes = ("startup", "readiness", "liveness")
    paths = {probe: CONTAINER[f"{probe}Probe"]["httpGet"]["path"] for probe in probes}
    return {probe for probe, path in paths.items() if 200 <= http.get(path).status_code < 400}


def test_a_pod_has_started_when_it_is_warm(start_server, tmp_path, until):
    gate, port = tmp_path / "gate", find_free_port()
    environment = {"GATE": str(gate), "WAIT_AT_START": "1"}
    server = start_server("--port", str(port), *KEY, env=environment, script=SCRIPT, wait=False)
    server.url = f"http://127.0.0.1:{port}"
    with server.client() as http:
        until(lambda: is_up(http))
        assert passing(http) == {"liveness"}
        gate.touch()
        server.wait_until_ready()
        assert passing(http) == {"startup", "readiness", "liveness"}
        assert http.get(SCRAPE["path"]).status_code == 200


def test_a_pod_that_drains_gets_no_work_and_is_not_killed(stage_of):
    stage = stage_of()
    running = stage.occupy_device()
    stage.server.terminate()
    stage.until(lambda: "draining" in stage.server.log)
    assert passing(stage.http) == {"liveness"}
    stage.open_gate()
    assert running.result().status_code == 200
    assert stage.server.wait() == 0


def test_a_scrape_has_what_the_adapter_asks_for(api):
    sample = api.get("/sample.npy").content
    assert api.post("/v1/layer_norm", content=sample).status_code == 200
    scraped = api.get(SCRAPE["path"]).text
    rules = yaml.safe_load((K8S / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    assert rules
    for rule in rules:
        # Without the labels that the scrape adds.
        series = re.sub(r',?(namespace|pod)!=""', "", rule["seriesQuery"]).removesuffix("{}")
        assert re.search(rf"^{re.escape(series)} ", scraped, re.MULTILINE), series
