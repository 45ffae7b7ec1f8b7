"""The InferenceService, as kustomize renders it: its pod is valid, and what it says about the server is true of it.

KServe's controller makes a Deployment of the predictor; what that adds to a pod's fields is listed and the rest is
checked as a pod.  Where KServe's own package is, all of it is checked against its models.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docker.k8s.conftest import DOCKERFILE, K8S, run

# Of a predictor's fields, those that no pod has.
_KSERVES = ("minReplicas", "maxReplicas")
_SCHEMA = Path(__file__).with_name("kserve_schema.py")


@pytest.fixture(scope="module")
def service(dev_tool):
    (service,) = yaml.safe_load_all(run(dev_tool("kubectl"), "kustomize", str(K8S / "kserve")))
    return service


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


def test_its_probes_are_those_of_the_protocol_and_need_no_key(container):
    from normserve.http.routes.route_scopes import DECLARED, PUBLIC

    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert path.startswith("/v2/health/")
        assert DECLARED["GET", path] == PUBLIC
