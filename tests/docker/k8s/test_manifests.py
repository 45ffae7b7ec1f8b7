"""The manifests, as kustomize renders them, are valid, and what they say about the server is true of it.

What the probes are answered is in tests/integration/process/test_kubernetes.py.  No cluster runs here: what its
scheduler and its controllers make of the manifests is not tested.
"""

import os
import re

import pytest
import yaml
from normserve.settings import Settings

from tests.docker.k8s.conftest import DOCKERFILE, K8S, ROOT, run


# The oldest release that is supported, and the newest whose schemas are here.
@pytest.mark.parametrize("release", ["1.30", "newest"])
def test_manifests_are_valid(rendered, release):
    # Its import takes a second.
    from kubernetes_validate import latest_version, validate

    version = latest_version() if release == "newest" else release
    # The schemas of these come with their operator.
    known = [each for each in yaml.safe_load_all(rendered) if each["apiVersion"] != "monitoring.coreos.com/v1"]
    for manifest in known:
        assert version.startswith(validate(manifest, version, strict=True))


def test_every_file_is_used():
    """One that no kustomization names would be read by nobody, and rot."""
    for folder in K8S.iterdir():
        if not folder.is_dir():
            continue
        kustomization = (folder / "kustomization.yaml").read_text(encoding="utf-8")
        for file in folder.iterdir():
            assert file.name == "kustomization.yaml" or f" {file.name}\n" in kustomization, file


def test_example_of_the_documentation(dev_tool, tmp_path):
    document = (ROOT / "docs/deploying/kubernetes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", document, re.DOTALL)
    written = yaml.safe_load(example)
    # Where it is checked out is the reader's affair.
    (resource,) = written["resources"]
    path = ROOT / resource.removeprefix("normserve/")
    written["resources"] = [os.path.relpath(path.resolve(), tmp_path.resolve())]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    found = {
        each["kind"]: each for each in yaml.safe_load_all(run(dev_tool("kubectl"), "kustomize", str(tmp_path)))
    }
    assert not {"ServiceMonitor", "PrometheusRule"} & found.keys()
    assert {each["metadata"]["namespace"] for each in found.values()} == {written["namespace"]}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    (image,) = written["images"]
    assert container["image"] == f"{image['newName']}:{image['newTag']}"
    (literal,) = written["configMapGenerator"][0]["literals"]
    name, value = literal.split("=")
    assert name.removeprefix("NORMSERVE_").lower() in Settings.model_fields
    assert found["ConfigMap"]["data"].items() > {(name, value)}


def test_nothing_is_for_one_namespace(manifests):
    assert not any("namespace" in manifest["metadata"] for manifest in manifests.values())


def test_image_is_what_build_image_builds(container, overlay):
    script = (ROOT / "docker/build-image.sh").read_text(encoding="utf-8")
    (tag,) = re.findall(r'--tag "([^"]+)"', script)
    assert container["image"] == tag.replace("$TARGET", overlay)
    assert re.search(rf"^FROM \S+ AS {overlay}$", DOCKERFILE, re.MULTILINE)


def test_selectors_find_the_pods(manifests):
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels
    for selector in (
        manifests["Deployment"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        manifests["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"][
            "matchLabels"
        ],
    ):
        assert selector == labels
    assert (
        manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == manifests["Service"]["metadata"]["labels"]
    )


def test_ports_are_those_the_server_listens_on(manifests, container, settings):
    ports = container["ports"]
    assert [each["containerPort"] for each in ports] == [settings.port, settings.grpc_port]
    assert settings.host == "0.0.0.0"
    served = manifests["Service"]["spec"]["ports"]
    (monitored,) = manifests["ServiceMonitor"]["spec"]["endpoints"]
    requests, scrapes = manifests["NetworkPolicy"]["spec"]["ingress"]
    names = [each["name"] for each in ports]
    assert [each["targetPort"] for each in served] == [each["port"] for each in requests["ports"]] == names
    assert [each["port"] for each in scrapes["ports"]] == [monitored["port"]] == [served[0]["name"]]
    port = ports[0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]


def test_service_of_that_name_does_not_set_the_port(manifests, pod, monkeypatch):
    name = manifests["Service"]["metadata"]["name"].upper()
    monkeypatch.setenv(f"{name}_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ValueError, match="port"):
        Settings()
    assert pod["enableServiceLinks"] is False


def test_rules_for_prometheus_find_the_job(manifests):
    """An operator's scrape gets the Service's name for its job, unless jobLabel says otherwise."""
    assert "jobLabel" not in manifests["ServiceMonitor"]["spec"]
    alerts = (ROOT / "docker/rules/alerts.yml").read_text(encoding="utf-8")
    assert set(re.findall(r'job="(\w+)"', alerts)) == {manifests["Service"]["metadata"]["name"]}


def test_rules_of_the_operator_are_those_of_prometheus(manifests, tool, tmp_path):
    """If this fails, run python docker/k8s/prometheus_rule.py."""
    groups = manifests["PrometheusRule"]["spec"]["groups"]
    written = []
    for file in sorted((ROOT / "docker/rules").glob("*.yml")):
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            written.append({**group, "name": f"{group['name']}-{file.stem}"})
    assert groups == written
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    run(tool("promtool", package="prometheus"), "check", "rules", str(tmp_path / "rules.yml"))


def test_budget_lets_a_node_be_drained(manifests):
    assert (
        manifests["PodDisruptionBudget"]["spec"]["maxUnavailable"]
        < manifests["HorizontalPodAutoscaler"]["spec"]["minReplicas"]
    )
