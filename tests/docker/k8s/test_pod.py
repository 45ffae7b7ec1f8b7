"""What the manifests say about the pod is true of the server in it."""

import re
from pathlib import Path

from normserve.http.app import _STOP_S
from normserve.process.owner_server import _FAREWELL_S, CLOSE_S
from normserve.settings import Settings

from tests.docker.k8s.conftest import DOCKERFILE
from tests.docker.k8s.quantities import GIB, nbytes


def test_grace_period_is_longer_than_the_drain(pod, container, settings):
    assert "lifecycle" not in container
    assert settings.drain_delay_s > 0
    needed_s = settings.drain_delay_s + settings.drain_s + _FAREWELL_S + CLOSE_S + _STOP_S
    assert pod["terminationGracePeriodSeconds"] > needed_s
    assert container["livenessProbe"]["terminationGracePeriodSeconds"] > settings.drain_delay_s


def test_settings_come_from_the_config_map_and_the_key_from_a_secret(manifests, container):
    assert container["envFrom"] == [{"configMapRef": {"name": manifests["ConfigMap"]["metadata"]["name"]}}]
    (key,) = container["env"]
    assert key["name"].removeprefix("NORMSERVE_").lower() in Settings.model_fields
    # Were it optional, a pod without the Secret would serve everybody.
    assert key["valueFrom"] == {"secretKeyRef": {"name": "normserve", "key": "api-key"}}


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
    # The gateway of gRPC bounds its messages by the same setting, has each response twice, and has room for four
    # messages of calls without a key.
    slabs += 3 * settings.max_inflight_bytes + 4 * settings.grpc_max_message_bytes
    kept = settings.max_idle_slab_bytes + settings.max_layer_bytes + nbytes(tmp["sizeLimit"])
    assert nbytes(container["resources"]["limits"]["memory"]) >= slabs + kept + GIB
    assert settings.max_body_bytes <= settings.max_inflight_bytes


def test_threads_leave_a_core_to_the_network(container, settings, overlay):
    cores = int(container["resources"]["requests"]["cpu"])
    # On a GPU torch computes nothing on the CPU.
    assert settings.cpu_threads == {"cpu": cores - 1, "gpu": 0}[overlay]
