"""`--drain-delay-s`: load balancers choose other servers while this one still works."""

import re

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from normserve.grpc.schema import HEALTH, get_message_class

from tests.integration.harness.gateways import find_gateway_address
from tests.integration.harness.servers import find_free_port, is_up
from tests.integration.harness.stage import SCRIPT
from tests.integration.harness.wire import X, assert_problem, npy

# Of one process with everything in it, of processes behind one port, and of processes before one with the device.
FLEETS = [(), ("--devices", "cpu,cpu"), ("--frontends", "2")]


def assert_works(http) -> None:
    assert http.post("/v1/layer_norm", content=npy(X)).status_code == 200


@pytest.mark.parametrize("options", FLEETS, ids=" ".join)
def test_a_server_that_retires_takes_work_and_is_not_ready(start_server, until, options):
    server = start_server("--drain-delay-s", "600", *options)
    with server.client() as early:
        assert_works(early)
        server.terminate()
        until(lambda: "retiring: " in server.log)
        until(lambda: early.get("/readyz").status_code == 503)
        # On a connection that was open, and on new ones.
        assert_works(early)
        for _ in range(3):
            with server.client() as late:
                assert_problem(late.get("/readyz"), 503, "draining")
                assert late.get("/v2/health/ready").status_code == 400
                assert late.get("/livez").status_code == 200
                assert_works(late)
        info = early.get("/v1/info").json()
        assert {each["state"] for each in info.get("processes", [info])} == {"retiring"}
        assert re.findall(r"^normserve_ready\S* (\S+)$", early.get("/metrics").text, re.MULTILINE)[0] == "0.0"
    server.terminate()
    assert server.wait() == 1


@pytest.mark.parametrize("options", FLEETS, ids=" ".join)
def test_after_the_delay_a_server_drains_and_ends(start_server, options):
    server = start_server("--drain-delay-s", "0.3", *options)
    server.terminate()
    assert server.wait() == 0
    assert server.log.index("retiring: ") < server.log.index("draining: ")


def test_a_server_that_is_not_ready_does_not_wait(start_server, tmp_path, until):
    gate, port = tmp_path / "gate", find_free_port()
    environment = {"GATE": str(gate), "WAIT_AT_START": "1"}
    options = ("--drain-delay-s", "600", "--port", str(port))
    server = start_server(*options, env=environment, script=SCRIPT, wait=False)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        until(lambda: is_up(http))
    server.terminate()
    until(lambda: "draining: " in server.log)
    gate.touch()
    assert server.wait() == 0


@pytest.mark.parametrize("options", FLEETS, ids=" ".join)
def test_the_gateway_of_grpc_takes_calls_and_does_not_serve(start_server, until, options):
    server = start_server("--drain-delay-s", "600", "--grpc-port", "0", *options)
    address = find_gateway_address(server)
    check = get_message_class("grpc.health.v1.HealthCheckRequest")().SerializeToString()
    given = triton.InferInput("x", [4, 12], "FP32")
    given.set_data_from_numpy(np.ones((4, 12), np.float32))

    def ask_health(channel) -> int:
        response = channel.unary_unary(f"/{HEALTH}/Check")(check)
        return get_message_class("grpc.health.v1.HealthCheckResponse").FromString(response).status

    with grpc.insecure_channel(address) as channel:
        assert ask_health(channel) == 1
        server.terminate()
        until(lambda: ask_health(channel) == 2)
        with triton.InferenceServerClient(address) as late:
            assert not late.is_server_ready()
            assert late.is_model_ready("layer_norm")
            assert np.isfinite(late.infer("layer_norm", [given]).as_numpy("y")).all()
        assert ask_health(channel) == 2
    server.terminate()
    assert server.wait() == 1


def test_after_the_delay_the_gateway_of_grpc_drains_and_ends(start_server):
    server = start_server("--drain-delay-s", "0.3", "--grpc-port", "0")
    find_gateway_address(server)
    server.terminate()
    assert server.wait() == 0
    assert server.log.count("retiring: ") == server.log.count("draining: ") == 2
