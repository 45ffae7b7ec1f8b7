"""Starting: what is announced, and what keeps the server from it."""

import socket

import pytest
import safetensors.torch
import torch

from tests.integration.harness.wire import assert_alive


def test_port_in_use(start_server, server):
    refused = start_server("--port", str(server.address[1]), wait=False)
    assert refused.wait() != 0
    assert "Address already in use" in refused.log


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_triton_without_a_device(start_server):
    refused = start_server("--backend", "triton", wait=False)
    assert refused.wait() == 1
    assert "needs a CUDA device" in refused.log


@pytest.mark.parametrize("content", [None, b"no safetensors at all"])
def test_checkpoint_that_cannot_be_read(start_server, tmp_path, content):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    refused = start_server("--checkpoint", str(path), wait=False)
    assert refused.wait() == 1
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


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_listens_on_ipv6(start_server):
    server = start_server("--host", "::1")
    assert "[::1]" in server.url
    with server.client() as http:
        assert_alive(http)
