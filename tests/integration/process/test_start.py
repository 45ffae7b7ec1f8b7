"""Starting: what is announced, and what keeps the server from it."""

import json
import os
import socket

import pytest
import safetensors.torch
import torch
from normserve.client import Client

from tests.integration.harness.servers import of_one_process
from tests.integration.harness.stage import SCRIPT
from tests.integration.harness.wire import assert_alive

#: A server and a fleet, whose first process listens.
FLEET = ("--devices", "cpu")


@pytest.mark.parametrize("more", [(), FLEET])
@pytest.mark.parametrize(
    ("option", "value"), [("--host", "a..b"), ("--uds", "/no/such/folder/socket"), ("--local", "/dev/null")]
)
def test_where_no_server_can_listen_no_restart_helps(start_server, more, option, value):
    refused = start_server(option, value, *more, wait=False)
    assert refused.wait() == 2
    assert f"the server cannot listen: {option} {value}: " in refused.log
    assert "Traceback" not in refused.log


def test_port_in_use(start_server, server):
    refused = start_server("--port", str(server.address[1]), wait=False)
    assert refused.wait() == 2
    assert "Address already in use" in refused.log


@pytest.mark.parametrize("option", ["--uds", "--local"])
@pytest.mark.parametrize("more", [(), FLEET])
def test_the_socket_of_another_server_is_its_own(start_server, tmp_path, option, more):
    path = tmp_path / "socket"
    server = start_server(option, str(path))
    refused = start_server(option, str(path), *more, wait=False)
    assert refused.wait() == 2
    assert f"{option} {path}: another server listens there" in refused.log
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    server.terminate()
    assert server.wait() == 0
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced(start_server, tmp_path):
    path = tmp_path / "socket"
    killed = start_server("--uds", str(path))
    killed.process.kill()
    killed.wait()
    assert path.is_socket()
    start_server("--uds", str(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_triton_without_a_device(start_server):
    refused = start_server("--backend", "triton", wait=False)
    assert refused.wait() == 2
    assert "needs a CUDA device" in refused.log
    assert "crash report" not in refused.log


@pytest.mark.parametrize("more", [(), FLEET])
@pytest.mark.parametrize(
    "make",
    [lambda path: None, lambda path: path.write_bytes(b"no safetensors at all"), os.mkfifo],
    ids=["missing", "malformed", "pipe"],
)
def test_checkpoint_that_cannot_be_read(start_server, tmp_path, make, more):
    path = tmp_path / "model.safetensors"
    make(path)
    refused = start_server("--checkpoint", str(path), *more, wait=False)
    assert refused.wait() == 2
    assert str(path) in refused.log
    assert "Traceback" not in refused.log


def test_checkpoint_layers_go_by_their_names(start_server, tmp_path):
    def pair(name: str, *shape: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.randn(shape), f"{name}.bias": torch.randn(shape)}

    path = tmp_path / "model.safetensors"
    tensors = {
        **pair("encoder.LayerNorm", 8),
        **pair("h.0.ln_1", 4),
        **pair("ln_f", 4),
        **pair("dense", 4),
        **pair("aln.dense", 4),
        **pair("norm_2d", 4, 4),
        **pair("batch_norm", 4),
        "batch_norm.running_mean": torch.zeros(4),
        "alone.norm.weight": torch.ones(4),
        "position_ids": torch.arange(5),
    }
    safetensors.torch.save_file(tensors, path)
    server = start_server(env={"NORMSERVE_CHECKPOINT": str(path)})
    with server.client() as http:
        layers = {layer["name"]: layer for layer in http.get("/v1/layers").json()["layers"]}
        assert_alive(http)
    assert layers.keys() == {"encoder.LayerNorm", "h.0.ln_1", "ln_f"}
    assert layers["encoder.LayerNorm"]["size"] == 8
    assert layers["ln_f"]["eps"] == 1e-5
    warnings = [line.partition(" process=")[0].strip() for line in server.lines if "WARNING" in line]
    reasons = [line.partition(" are left out: ")[2] for line in warnings]
    assert {
        name: "--checkpoint-op" in reason for reason, _, name in (each.rpartition(": ") for each in reasons)
    } == {
        "alone.norm": True,
        "norm_2d": False,
        "batch_norm": False,
    }


LLAMA = {
    "model.layers.0.input_layernorm.weight": torch.rand(8),
    "model.layers.0.mlp.up_proj.weight": torch.rand(8, 8),
    "model.norm.weight": torch.rand(8),
}


@pytest.mark.parametrize(
    ("config", "options", "eps", "offset"),
    [
        ({"model_type": "llama", "rms_norm_eps": 1e-5}, (), 1e-5, 0),
        ({"model_type": "gemma2", "rms_norm_eps": 1e-6}, (), 1e-6, 1),
        (None, ("--checkpoint-op", "rms_norm"), 1e-6, 0),
    ],
    ids=["llama", "gemma", "setting"],
)
def test_norms_without_a_bias_are_rms_norms(start_server, tmp_path, config, options, eps, offset):
    safetensors.torch.save_file(LLAMA, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    server = start_server("--checkpoint", str(tmp_path / "model.safetensors"), *options)
    x, weight = torch.randn(3, 8), LLAMA["model.norm.weight"]
    with Client(server.url) as client:
        assert {(layer["name"], layer["op"]) for layer in client.layers()} == {
            ("model.layers.0.input_layernorm", "rms_norm"),
            ("model.norm", "rms_norm"),
        }
        y = client.rms_norm(x, layer="model.norm").y
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), weight + offset, eps))
    assert "registered 2 layers" in server.log
    assert "WARNING" not in server.log


def test_a_checkpoint_without_norms_is_a_warning(start_server, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"dense.weight": torch.ones(4)}, path)
    server = start_server("--checkpoint", str(path))
    assert f"{path} has no norms" in server.log


def test_more_layers_than_may_be_kept_need_another_setting(start_server, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"ln.weight": torch.ones(64), "ln.bias": torch.ones(64)}, path)
    refused = start_server("--checkpoint", str(path), "--max-layer-bytes", "100", wait=False)
    assert refused.wait() == 2
    assert str(path) in refused.log


@pytest.mark.slow
@of_one_process
def test_sigterm_while_the_device_warms_up(start_server, until):
    """A thread that is deep in torch does not abort the process that ends without it."""
    # Not forked: this is about the end of the interpreter, which a forked process does not have.
    server = start_server(env={"COMPUTE_AT_START": "1"}, script=SCRIPT, wait=False, preloaded=False)
    until(lambda: "computing" in server.log)
    server.terminate()
    assert server.wait() == 0
    assert "exit_code=0" in server.log


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_listens_on_ipv6(start_server):
    server = start_server("--host", "::1")
    assert "[::1]" in server.url
    with server.client() as http:
        assert_alive(http)
