"""The pod whose containers share memory, as kustomize renders it, and the compose file that does the same."""

import pytest
import yaml
from normserve.client.http.server_address import ServerAddress
from normserve.settings import Settings

from tests.docker.k8s.conftest import K8S, run
from tests.docker.k8s.quantities import GIB, nbytes


@pytest.fixture(scope="module")
def sidecar(dev_tool):
    found = yaml.safe_load_all(run(dev_tool("kubectl"), "kustomize", str(K8S / "sidecar")))
    return {manifest["kind"]: manifest for manifest in found}


@pytest.fixture(scope="module")
def its_pod(sidecar):
    return sidecar["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def server(its_pod):
    (server,) = its_pod["initContainers"]
    return server


@pytest.fixture(scope="module")
def program(its_pod):
    (program,) = its_pod["containers"]
    return program


def told(container):
    return {each["name"]: each["value"] for each in container["env"]}


def settings_of(environment):
    return Settings(**{name.removeprefix("NORMSERVE_").lower(): value for name, value in environment.items()})


def compose():
    return yaml.safe_load((K8S.parent / "compose.sidecar.yaml").read_text(encoding="utf-8"))


# The oldest release that has sidecars without being told to, and the newest whose schemas are here.
@pytest.mark.parametrize("release", ["1.30", "newest"])
def test_manifests_are_valid(sidecar, release):
    from kubernetes_validate import latest_version, validate

    version = latest_version() if release == "newest" else release
    for manifest in sidecar.values():
        assert version.startswith(validate(manifest, version, strict=True))


def test_both_meet_at_the_socket(server, program):
    socket = str(settings_of(told(server)).local)
    address = ServerAddress.parse_url(told(program)["NORMALISE_AT"])
    assert address.is_shared_memory
    assert address.socket_path == socket
    for container in (server, program):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert socket.startswith(mounts["socket"] + "/")


def test_the_server_is_there_before_the_program_and_after_it(server, its_pod):
    assert server["restartPolicy"] == "Always"
    assert server["startupProbe"]["httpGet"] == {"path": "/readyz", "port": settings_of(told(server)).port}
    assert its_pod["terminationGracePeriodSeconds"] > settings_of(told(server)).drain_s


def test_both_are_one_user_of_no_privileges(its_pod, server, program):
    assert its_pod["securityContext"]["runAsNonRoot"] is True
    for container in (server, program):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_memory_holds_what_is_admitted_and_what_is_shared(server, its_pod):
    settings = settings_of(told(server))
    (tmp,) = [volume["emptyDir"] for volume in its_pod["volumes"] if volume["name"] == "tmp"]
    kept = settings.max_idle_slab_bytes + settings.max_layer_bytes + nbytes(tmp["sizeLimit"])
    needed = 5 * settings.max_inflight_bytes // 4 + kept + settings.local_bytes + GIB
    assert nbytes(server["resources"]["limits"]["memory"]) >= needed


def test_compose_does_the_same_without_a_network():
    services = compose()["services"]
    server, program = services["normserve"], services["program"]
    socket = str(settings_of(server["environment"]).local)
    assert ServerAddress.parse_url(program["environment"]["NORMALISE_AT"]).socket_path == socket
    assert server["user"] == program["user"]
    for service in (server, program):
        assert service["network_mode"] == "none"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert any(volume.startswith(f"socket:{socket.rpartition('/')[0]}") for volume in service["volumes"])
    assert f"uid={server['user'].split(':')[0]}," in compose()["volumes"]["socket"]["driver_opts"]["o"]
