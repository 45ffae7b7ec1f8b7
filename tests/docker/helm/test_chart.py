"""The Helm chart, as Helm's own library renders it: it has what the overlays of kustomize have, and is valid."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from normserve.settings import Settings

from tests.docker.k8s.conftest import DOCKERFILE, K8S, OVERLAYS, ROOT, dev_tool, run
from tests.docker.k8s.quantities import nbytes

__all__ = ["dev_tool"]

CHART = ROOT / "docker/helm/normserve"
KEYS_FILE = {"NORMSERVE_API_KEYS_FILE": "/etc/normserve/keys/keys.toml"}
TLS = {"NORMSERVE_TLS_CERT": "/etc/normserve/tls/tls.crt", "NORMSERVE_TLS_KEY": "/etc/normserve/tls/tls.key"}
CLIENT_CA = {"NORMSERVE_TLS_CLIENT_CA": "/etc/normserve/tls/ca.crt"}
AUTHORISATION = {"credentials": {"name": "normserve-metrics", "key": "api-key"}}
VERIFICATION = {"ca": {"secret": {"name": "normserve-tls", "key": "ca.crt"}}, "serverName": "norm.example"}
#: What Helm's labels add, which kustomize has not.
HELMS = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"}


def ask_helm(release: str, values: dict) -> dict:
    script = Path(__file__).with_name("render_chart.py")
    given = json.dumps([str(CHART), release, values])
    done = subprocess.run([sys.executable, script], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def render(release: str = "normserve", **values: object) -> dict[str, dict]:
    """The manifests by kind."""
    files = ask_helm(release, values)["files"].values()
    found = [each for file in files for each in yaml.safe_load_all(file) if each]
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


def get_pod(manifests: dict) -> dict:
    return manifests["Deployment"]["spec"]["template"]["spec"]


def get_container(manifests: dict) -> dict:
    (container,) = get_pod(manifests)["containers"]
    return container


def get_probes(manifests: dict) -> dict[str, dict]:
    """Of each probe what it asks, without its times."""
    container = get_container(manifests)
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    return {name: probe.get("exec") or probe["httpGet"] for name, probe in probes.items()}


@pytest.fixture(scope="module")
def charts():
    return {device: render(device=device) for device in OVERLAYS}


@pytest.fixture(scope="module")
def overlays(dev_tool):
    kustomize = (dev_tool("kubectl"), "kustomize")
    return {
        name: {each["kind"]: each for each in yaml.safe_load_all(run(*kustomize, str(K8S / name)))}
        for name in OVERLAYS
    }


def reduce_labels(node: object) -> None:
    """Remove Helm's labels everywhere."""
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        reduce_labels(each)
    if isinstance(node, dict):
        for name in HELMS & node.keys():
            del node[name]


def reduce_chart(manifests: dict[str, dict]) -> dict[str, dict]:
    """What remains of the chart's manifests without what only Helm has."""
    reduced = copy.deepcopy(manifests)
    reduce_labels(reduced)
    del reduced["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    del reduced["ServiceMonitor"]["spec"]["jobLabel"]
    return reduced


def reduce_overlay(manifests: dict[str, dict]) -> dict[str, dict]:
    """What remains of an overlay's manifests without what only kustomize has: the hash in a name."""
    reduced = copy.deepcopy(manifests)
    reduced["ConfigMap"]["metadata"]["name"] = "normserve"
    (container,) = reduced["Deployment"]["spec"]["template"]["spec"]["containers"]
    container["envFrom"][0]["configMapRef"]["name"] = "normserve"
    target = reduced["HorizontalPodAutoscaler"]["spec"]["metrics"][1]["pods"]["target"]
    target["averageValue"] = str(nbytes(target["averageValue"]))
    return reduced


@pytest.mark.parametrize("device", OVERLAYS)
def test_it_has_what_the_overlay_has(charts, overlays, device):
    chart, overlay = reduce_chart(charts[device]), reduce_overlay(overlays[device])
    assert chart.keys() == overlay.keys()
    for kind, manifest in overlay.items():
        assert chart[kind] == manifest, kind


def test_helm_finds_no_fault():
    found = ask_helm("normserve", {})
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("release", ["1.30", "newest"])
@pytest.mark.parametrize("device", OVERLAYS)
def test_it_is_valid(charts, device, release):
    require_valid(charts[device], release)


def require_valid(manifests: dict[str, dict], release: str = "newest") -> None:
    # Its import takes a second.
    from kubernetes_validate import latest_version, validate

    version = latest_version() if release == "newest" else release
    for manifest in manifests.values():
        # The schemas of these come with their operator.
        if manifest["apiVersion"] != "monitoring.coreos.com/v1":
            assert version.startswith(validate(manifest, version, strict=True))


def test_two_releases_do_not_meet():
    one, other = render("one"), render("other")
    for kind, manifest in one.items():
        assert manifest["metadata"]["name"] == "one"
        assert other[kind]["metadata"]["name"] == "other"
    selector = one["Service"]["spec"]["selector"]
    assert selector == one["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert selector != other["Service"]["spec"]["selector"]
    # The rules ask for this job, which is the value of the label that jobLabel names.
    assert one["Service"]["metadata"]["labels"][one["ServiceMonitor"]["spec"]["jobLabel"]] == "normserve"


def test_values_are_used():
    found = render(
        "any",
        image={"repository": "registry.example.com/normserve", "tag": "0.1.0-gpu"},
        device="gpu",
        settings={
            "NORMSERVE_MAX_INFLIGHT_BYTES": 2**31,
            "NORMSERVE_TRACE_RATIO": 0.5,
            "NORMSERVE_ACCESS_LOG": True,
        },
        resources={"limits": {"memory": "9Gi"}},
        autoscaling={"minReplicas": 1, "maxReplicas": 3},
        apiKeySecret="key",
        prometheusNamespace="watch",
        monitoring=False,
        runtimeClassName="nvidia",
    )
    assert not {"ServiceMonitor", "PrometheusRule"} & found.keys()
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,), (baking,) = pod["containers"], pod["initContainers"]
    assert pod["runtimeClassName"] == "nvidia"
    assert container["image"] == baking["image"] == "registry.example.com/normserve:0.1.0-gpu"
    assert container["resources"] == {"limits": {"memory": "9Gi"}}
    assert container["env"][0]["valueFrom"]["secretKeyRef"]["name"] == "key"
    told = found["ConfigMap"]["data"]
    assert told["NORMSERVE_MAX_INFLIGHT_BYTES"] == "2147483648"
    assert (told["NORMSERVE_TRACE_RATIO"], told["NORMSERVE_ACCESS_LOG"]) == ("0.5", "true")
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 3)
    assert scaler["metrics"][1]["pods"]["target"]["averageValue"] == str(2**30)
    (prometheus,) = found["NetworkPolicy"]["spec"]["ingress"][1]["from"]
    assert prometheus["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "watch"}


def test_a_key_is_needed_unless_it_is_said_that_there_is_none(charts):
    (key,) = get_container(charts["cpu"])["env"]
    assert key["valueFrom"] == {"secretKeyRef": {"name": "normserve", "key": "api-key"}}
    assert "env" not in get_container(render(apiKeySecret=""))


@pytest.mark.parametrize("device", OVERLAYS)
def test_a_secret_is_mounted_for_a_file_of_keys(charts, device):
    volume = {"name": "keys", "secret": {"secretName": "normserve-keys", "defaultMode": 0o440}}
    mount = {"name": "keys", "mountPath": "/etc/normserve/keys", "readOnly": True}
    found = render(
        device=device,
        settings=KEYS_FILE,
        extraVolumes=[volume],
        extraVolumeMounts=[mount],
        serviceMonitor={"authorization": AUTHORISATION},
    )
    require_valid(found)
    usual = charts[device]
    assert get_pod(found)["volumes"] == [*get_pod(usual)["volumes"], volume]
    assert get_container(found)["volumeMounts"] == [*get_container(usual)["volumeMounts"], mount]
    # The server would refuse to start with both.
    assert "env" not in get_container(found)
    assert get_probes(found) == get_probes(usual)
    (endpoint,), (usually,) = (each["ServiceMonitor"]["spec"]["endpoints"] for each in (found, usual))
    assert endpoint == {**usually, "authorization": AUTHORISATION}


def test_tls_reaches_probes_and_scrapes(charts):
    found = render(settings=TLS, serviceMonitor={"tlsConfig": VERIFICATION})
    require_valid(found)
    usual = get_probes(charts["cpu"])
    assert get_probes(found) == {name: {**probe, "scheme": "HTTPS"} for name, probe in usual.items()}
    (endpoint,), (usually,) = (each["ServiceMonitor"]["spec"]["endpoints"] for each in (found, charts["cpu"]))
    assert endpoint == {**usually, "scheme": "https", "tlsConfig": VERIFICATION}
    # h2c is HTTP/2 without TLS.
    assert not any("appProtocol" in port for port in found["Service"]["spec"]["ports"])


@pytest.mark.parametrize("uds", [None, "/tmp/other.sock"])
def test_probes_need_no_certificate_of_a_client(charts, uds):
    settings = TLS | CLIENT_CA | ({} if uds is None else {"NORMSERVE_UDS": uds})
    found = render(settings=settings, monitoring=False)
    require_valid(found)
    (script,) = re.findall(r"^COPY docker/healthcheck.py (\S+)$", DOCKERFILE, re.MULTILINE)
    asked = {name: probe["path"] for name, probe in get_probes(charts["cpu"]).items()}
    assert get_probes(found) == {name: {"command": ["python", script, path]} for name, path in asked.items()}
    # The script asks on this socket, in a folder that the server may write to.
    socket = Path(found["ConfigMap"]["data"]["NORMSERVE_UDS"])
    assert socket == Path(uds or "/tmp/normserve.sock")
    assert str(socket.parent) in {mount["mountPath"] for mount in get_container(found)["volumeMounts"]}


def test_prometheus_may_scrape_by_a_pods_address_where_hosts_are_listed():
    found = render(settings={"NORMSERVE_ALLOWED_HOSTS": "api.example"}, apiKeySecret="")
    require_valid(found)
    address, hosts = get_container(found)["env"]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    # Kubernetes puts in the variables that come before, and gives those of `env` precedence.
    assert hosts == {"name": "NORMSERVE_ALLOWED_HOSTS", "value": f"api.example,$({address['name']})"}
    # Every host.
    assert "env" not in get_container(render(settings={"NORMSERVE_ALLOWED_HOSTS": "*"}, apiKeySecret=""))


def test_the_values_of_the_documents_are_valid():
    text = (ROOT / "docs/deploying/kubernetes.md").read_text(encoding="utf-8")
    (values,) = re.findall(r"```yaml\n(settings:.*?)```", text, re.DOTALL)
    found = render(**yaml.safe_load(values))
    require_valid(found)
    folders = {mount["mountPath"] for mount in get_container(found)["volumeMounts"]}
    named = [Path(value) for value in found["ConfigMap"]["data"].values() if value.startswith("/")]
    assert len(named) == 3
    assert {str(path.parent) for path in named} <= folders


@pytest.mark.parametrize(
    ("settings", "given", "needed"),
    [
        (TLS, {"authorization": AUTHORISATION}, "tlsConfig"),
        (KEYS_FILE, {"tlsConfig": VERIFICATION}, "authorization"),
    ],
)
def test_a_scrape_that_would_fail_is_refused_unless_there_is_none(settings, given, needed):
    refused = ask_helm("normserve", {"settings": settings, "serviceMonitor": given})
    assert f"serviceMonitor.{needed}" in refused["error"]
    assert "ServiceMonitor" not in render(settings=settings, monitoring=False)


def test_every_setting_that_the_chart_names_exists():
    texts = [path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir()]
    named = {name for text in texts for name in re.findall(r"NORMSERVE_([A-Z_]+)", text)}
    assert "TLS_CLIENT_CA" in named
    assert {name.lower() for name in named} <= Settings.model_fields.keys()


def test_a_longer_drain_has_a_longer_grace_period(charts):
    def get_grace_s(manifests: dict) -> int:
        return get_pod(manifests)["terminationGracePeriodSeconds"]

    changed = render(settings={"NORMSERVE_DRAIN_S": 120, "NORMSERVE_DRAIN_DELAY_S": "7.5"})
    assert get_grace_s(changed) - get_grace_s(charts["cpu"]) == 93


def test_a_changed_setting_rolls_the_pods(charts):
    def get_annotations(manifests: dict) -> dict:
        return manifests["Deployment"]["spec"]["template"]["metadata"]["annotations"]

    changed = render(settings={"NORMSERVE_WARM_SIZES": "768"})
    assert get_annotations(changed) != get_annotations(charts["cpu"])


@pytest.mark.parametrize(
    "values",
    [
        {"device": "tpu"},
        {"devices": "cpu"},
        {"settings": {"WARM_SIZES": "768"}},
        {"settings": {"NORMSERVE_PORT": 80}},
        {"settings": {"NORMSERVE_API_KEY": "in a ConfigMap"}},
        {"settings": {"NORMSERVE_MAX_INFLIGHT_BYTES": "4GiB"}},
        {"autoscaling": {"minReplicas": 0}},
        {"extraVolumes": {"name": "keys"}},
        {"extraVolumeMounts": [{"name": "keys"}]},
        {"serviceMonitor": {"scheme": "https"}},
    ],
)
def test_wrong_values_are_refused(values):
    assert "error" in ask_helm("normserve", values)
