"""The manifests, as kustomize renders them, are valid, and what they say about the server is true of it.

What the probes are answered is in tests/integration/process/test_kubernetes.py.  No cluster runs here: what its
scheduler and its controllers make of the manifests is not tested.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from normserve.http.app import _STOP_S
from normserve.process.server import _CLOSE_S, _FAREWELL_S
from normserve.settings import Settings

ROOT = Path(__file__).parents[2]
K8S = ROOT / "docker/k8s"
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
OVERLAYS = ["cpu", "gpu"]
GIB = 2**30


@pytest.fixture(scope="session")
def dev_tool(tool):
    """Programs that the extra `dev` puts beside the interpreter."""

    def find(name: str) -> str:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return shutil.which(name, path=path) or tool.missing("pip install -c constraints.txt -e '.[dev]'")

    return find


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session", params=OVERLAYS)
def overlay(request):
    return request.param


@pytest.fixture(scope="session")
def rendered(dev_tool, overlay):
    return run(dev_tool("kubectl"), "kustomize", str(K8S / overlay))


@pytest.fixture(scope="session")
def manifests(rendered):
    found = list(yaml.safe_load_all(rendered))
    by_kind = {manifest["kind"]: manifest for manifest in found}
    assert len(by_kind) == len(found)
    return by_kind


@pytest.fixture(scope="session")
def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="session")
def container(pod):
    (container,) = pod["containers"]
    return container


@pytest.fixture(scope="session")
def settings(manifests, overlay):
    """What the server is told: by the image, and over it by the ConfigMap."""
    image = dict(re.findall(r"\bNORMSERVE_([A-Z_]+)=([^\s\\]+)", DOCKERFILE.split(" AS gpu\n")[0]))
    image["BACKEND"] = {"cpu": "torch", "gpu": "triton"}[overlay]
    configured = {name.removeprefix("NORMSERVE_"): value for name, value in manifests["ConfigMap"]["data"].items()}
    assert all(name.startswith("NORMSERVE_") for name in manifests["ConfigMap"]["data"])
    return Settings(**{name.lower(): value for name, value in (image | configured).items()})


def nbytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()
    return int(number) * 2 ** {"Ki": 10, "Mi": 20, "Gi": 30}[unit]


# The oldest release that knows preStop's sleep without being told to, and the newest whose schemas are here.
@pytest.mark.parametrize("release", [["-k", "1.30"], []], ids=["1.30", "newest"])
def test_manifests_are_valid(dev_tool, rendered, release, tmp_path):
    # The schema of a ServiceMonitor comes with its operator.
    known = [each for each in yaml.safe_load_all(rendered) if each["kind"] != "ServiceMonitor"]
    (tmp_path / "manifests.yaml").write_text(yaml.safe_dump_all(known), encoding="utf-8")
    said = run(dev_tool("kubernetes-validate"), "--strict", *release, str(tmp_path / "manifests.yaml"))
    assert said.count(" passed for resource ") == len(known)


def test_every_file_is_used():
    """One that no kustomization names would be read by nobody, and rot."""
    for folder in K8S.iterdir():
        if not folder.is_dir():
            continue
        kustomization = (folder / "kustomization.yaml").read_text(encoding="utf-8")
        for file in folder.iterdir():
            assert file.name == "kustomization.yaml" or f" {file.name}\n" in kustomization, file


def test_example_of_the_documentation(dev_tool, tmp_path):
    document = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
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
    assert "ServiceMonitor" not in found
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


def test_port_is_the_one_the_server_listens_on(manifests, container, settings):
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port
    assert settings.host == "0.0.0.0"
    (served,) = manifests["Service"]["spec"]["ports"]
    (monitored,) = manifests["ServiceMonitor"]["spec"]["endpoints"]
    (admitted,) = manifests["NetworkPolicy"]["spec"]["ingress"][0]["ports"]
    assert served["targetPort"] == admitted["port"] == port["name"]
    assert monitored["port"] == served["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]


def test_grace_period_is_longer_than_the_drain(pod, container, settings):
    asleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > asleep + settings.drain_s + _FAREWELL_S + _CLOSE_S + _STOP_S
    assert container["livenessProbe"]["terminationGracePeriodSeconds"] > asleep


def test_service_of_that_name_does_not_set_the_port(manifests, pod, monkeypatch):
    name = manifests["Service"]["metadata"]["name"].upper()
    monkeypatch.setenv(f"{name}_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ValueError, match="port"):
        Settings()
    assert pod["enableServiceLinks"] is False


def test_settings_come_from_the_config_map_and_the_key_from_a_secret_if_there_is_one(manifests, container):
    assert container["envFrom"] == [{"configMapRef": {"name": manifests["ConfigMap"]["metadata"]["name"]}}]
    (key,) = container["env"]
    assert key["name"].removeprefix("NORMSERVE_").lower() in Settings.model_fields
    assert key["valueFrom"]["secretKeyRef"]["optional"] is True


def test_pod_meets_the_restricted_standard(pod, container):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all("emptyDir" in volume for volume in pod["volumes"])


def test_baked_kernels_are_put_where_the_container_looks_for_them(pod, container, overlay):
    baking = pod.get("initContainers", [])
    assert len(baking) == {"cpu": 0, "gpu": 1}[overlay]
    for each in baking:
        cache = str(Path(re.search(r"TRITON_CACHE_DIR=(\S+)", DOCKERFILE)[1]).parent)
        (mount,) = each["volumeMounts"]
        assert each["image"] == container["image"]
        assert each["command"][-2:] == [f"{cache}/.", f"{mount['mountPath']}/"]
        assert {"name": mount["name"], "mountPath": cache} in container["volumeMounts"]
        assert each["securityContext"] == container["securityContext"]


def test_user_is_that_of_the_image(pod):
    (user,) = set(re.findall(r"^USER (\d+:\d+)$", DOCKERFILE, re.MULTILINE))
    context = pod["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    # Volumes belong to root but for their group.
    assert context["fsGroup"] == context["runAsGroup"]


def test_what_is_written_to_is_mounted(pod, container, overlay):
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    cache = re.search(r"TRITON_CACHE_DIR=(\S+)", DOCKERFILE)[1]
    written = {"cpu": {"/tmp"}, "gpu": {"/tmp", str(Path(cache).parent)}}[overlay]
    assert mounts.keys() == written
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}


def test_only_the_gpu_overlay_takes_a_gpu(container, overlay):
    assert container["resources"]["limits"].get("nvidia.com/gpu") == {"cpu": None, "gpu": 1}[overlay]


def test_memory_holds_what_is_admitted(container, pod, settings, overlay):
    """Admitted requests, what is kept idle, layers, what /tmp holds, and a gibibyte for the program."""
    (tmp,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["emptyDir"].get("medium") == "Memory"]
    slabs = {"cpu": 5 * settings.max_inflight_bytes // 4, "gpu": 2 * settings.max_inflight_bytes}[overlay]
    kept = settings.max_idle_slab_bytes + settings.max_layer_bytes + nbytes(tmp["sizeLimit"])
    assert nbytes(container["resources"]["limits"]["memory"]) >= slabs + kept + GIB
    assert settings.max_body_bytes <= settings.max_inflight_bytes


def test_threads_leave_a_core_to_the_network(container, settings, overlay):
    cores = int(container["resources"]["requests"]["cpu"])
    # On a GPU torch computes nothing on the CPU.
    assert settings.cpu_threads == {"cpu": cores - 1, "gpu": 0}[overlay]


def test_rules_for_prometheus_find_the_job(manifests):
    """An operator's scrape gets the Service's name for its job, unless jobLabel says otherwise."""
    assert "jobLabel" not in manifests["ServiceMonitor"]["spec"]
    alerts = (ROOT / "docker/rules/alerts.yml").read_text(encoding="utf-8")
    assert set(re.findall(r'job="(\w+)"', alerts)) == {manifests["Service"]["metadata"]["name"]}


def test_budget_lets_a_node_be_drained(manifests):
    assert (
        manifests["PodDisruptionBudget"]["spec"]["maxUnavailable"]
        < manifests["HorizontalPodAutoscaler"]["spec"]["minReplicas"]
    )


def test_autoscaler_alone_says_how_many(manifests):
    autoscaler = manifests["HorizontalPodAutoscaler"]["spec"]
    assert "replicas" not in manifests["Deployment"]["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == manifests["Deployment"]["metadata"]["name"]


def adapter_rules():
    rules = yaml.safe_load((K8S / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    series = [re.match(r"\w+", rule["seriesQuery"])[0] for rule in rules]
    return {rule.get("name", {}).get("as", name): (name, rule) for name, rule in zip(series, rules, strict=True)}


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
