"""The InferenceService, as kustomize renders it: its pod is valid, and what it says about the server is true of it.

KServe's controller makes a Deployment of the predictor; what that adds to a pod's fields is listed and the rest is
checked as a pod.  Where KServe's own package is, all of it is checked against its models.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from normserve.http.app import _STOP_S
from normserve.process.owner_server import _FAREWELL_S, CLOSE_S
from normserve.settings import Settings

from tests.docker.k8s.conftest import DOCKERFILE, K8S, run
from tests.docker.k8s.quantities import GIB, nbytes

# Of a predictor's fields, those that no pod has.
_KSERVES = ("minReplicas", "maxReplicas")
_SCHEMA = Path(__file__).with_name("kserve_schema.py")


@pytest.fixture(scope="module")
def both(dev_tool):
    """What there is for KServe, and the overlay for GPUs, each by kind."""
    folders = (run(dev_tool("kubectl"), "kustomize", str(K8S / name)) for name in ("kserve", "gpu"))
    return [{each["kind"]: each for each in yaml.safe_load_all(rendered)} for rendered in folders]


@pytest.fixture(scope="module")
def service(both):
    return both[0]["InferenceService"]


@pytest.fixture(scope="module")
def container(service):
    (container,) = service["spec"]["predictor"]["containers"]
    return container


def test_it_is_an_inference_service(service, container):
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert service["spec"].keys() == {"predictor"}
    assert container["name"] == "kserve-container"
    predictor = service["spec"]["predictor"]
    assert 1 <= predictor["minReplicas"] <= predictor["maxReplicas"]


@pytest.mark.parametrize("release", ["1.30", "newest"])
def test_its_pod_is_valid(service, release):
    # Its import takes a second.
    from kubernetes_validate import latest_version, validate

    version = latest_version() if release == "newest" else release
    spec = {name: value for name, value in service["spec"]["predictor"].items() if name not in _KSERVES}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": service["metadata"], "spec": spec}
    assert version.startswith(validate(pod, version, strict=True))


def mistakes(kserve_python: str, service: dict) -> list[str]:
    """What is wrong with a manifest, as KServe's own models say."""
    done = subprocess.run(
        [kserve_python, _SCHEMA],
        input=json.dumps(service),
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_as_kserves_models_have_it(kserve_python, service):
    assert mistakes(kserve_python, service) == []
    predictor = service["spec"]["predictor"]
    wrong = {**service, "spec": {"predictor": {**predictor, "replicas": 1, "minReplicas": "one"}}}
    assert mistakes(kserve_python, wrong) == [
        "service.spec.predictor.minReplicas must be int",
        "service.spec.predictor.replicas is no field of V1beta1PredictorSpec",
    ]


def test_its_ports_are_those_the_server_listens_on(container):
    http, grpc = container["ports"]
    assert f"EXPOSE {http['containerPort']} {grpc['containerPort']}" in DOCKERFILE
    assert {"name": "NORMSERVE_GRPC_PORT", "value": str(grpc["containerPort"])} in container["env"]
    assert grpc["name"] == "h2c"
    assert "NORMSERVE_HOST=0.0.0.0" in DOCKERFILE


def test_its_key_is_that_of_the_gpu_overlay(container, both):
    (gpu_container,) = both[1]["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert by_name(container["env"])["NORMSERVE_API_KEY"] == by_name(gpu_container["env"])["NORMSERVE_API_KEY"]


def test_its_probes_are_those_of_the_protocol_and_need_no_key(container):
    from normserve.http.routes.route_scopes import DECLARED, PUBLIC

    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert path.startswith("/v2/health/")
        assert DECLARED["GET", path] == PUBLIC


def by_name(items: list[dict]) -> dict:
    return {each["name"]: each for each in items}


def test_it_can_compile_kernels_where_the_gpu_overlay_can(service, container, both):
    """Either image may be put into it: the folders that are written to, the kernels of the image, and the user."""
    predictor, gpu = service["spec"]["predictor"], both[1]["Deployment"]["spec"]["template"]["spec"]
    (gpu_container,) = gpu["containers"]
    (baking,), (gpu_baking,) = predictor["initContainers"], gpu["initContainers"]
    assert baking["image"] == container["image"]
    assert {**baking, "image": gpu_baking["image"]} == gpu_baking
    assert by_name(container["volumeMounts"]) == by_name(gpu_container["volumeMounts"])
    assert by_name(predictor["volumes"]) == by_name(gpu["volumes"])
    assert container["securityContext"] == gpu_container["securityContext"]
    assert predictor["securityContext"] == gpu["securityContext"]


def test_it_has_the_threads_the_time_and_the_memory_that_it_needs(service, container):
    predictor = service["spec"]["predictor"]
    told = {
        each["name"].removeprefix("NORMSERVE_").lower(): each["value"]
        for each in container["env"]
        if "value" in each
    }
    settings = Settings(**told)
    assert settings.cpu_threads == int(container["resources"]["requests"]["cpu"]) - 1
    assert settings.drain_delay_s > 0
    needed_s = settings.drain_delay_s + settings.drain_s + _FAREWELL_S + CLOSE_S + _STOP_S
    assert predictor["terminationGracePeriodSeconds"] > needed_s
    (tmp,) = [each["emptyDir"] for each in predictor["volumes"] if each["name"] == "tmp"]
    kept = settings.max_idle_slab_bytes + settings.max_layer_bytes + nbytes(tmp["sizeLimit"])
    gateway = 3 * settings.max_inflight_bytes + 4 * settings.grpc_max_message_bytes
    needed = 5 * settings.max_inflight_bytes // 4 + gateway + kept + GIB
    assert nbytes(container["resources"]["limits"]["memory"]) >= needed


def test_its_pods_are_scraped_as_the_rules_expect(service, container, both):
    monitor = both[0]["PodMonitor"]["spec"]
    # KServe's label of the pods that it makes.
    assert monitor["selector"]["matchLabels"] == {"serving.kserve.io/inferenceservice": service["metadata"]["name"]}
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in [each["name"] for each in container["ports"]]
    (relabeling,) = endpoint["relabelings"]
    alerts = (K8S.parent / "rules/alerts.yml").read_text(encoding="utf-8")
    assert set(re.findall(r'job="(\w+)"', alerts)) == {relabeling["replacement"]}
