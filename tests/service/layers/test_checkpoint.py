"""What a checkpoint's surroundings say; the server with a checkpoint is in tests/integration."""

import os

import pytest
from normserve.errors import MalformedPayloadError
from normserve.layers.checkpoint import read_config_eps


@pytest.mark.parametrize(
    ("config", "eps"),
    [(None, 1e-5), ("not json", 1e-5), ('{"hidden_size": 8}', 1e-5), ('{"layer_norm_epsilon": 1e-9}', 1e-9)],
)
def test_checkpoint_layers_have_the_eps_of_the_configuration_beside_it(config, eps, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert read_config_eps(tmp_path / "model.safetensors") == eps


@pytest.mark.parametrize("eps", ["0.0", '"1e-5"', "-1.0", "NaN"])
def test_a_senseless_eps_beside_a_checkpoint_is_refused(eps, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"layer_norm_eps": {eps}}}')
    with pytest.raises(MalformedPayloadError, match=r"config\.json"):
        read_config_eps(tmp_path / "model.safetensors")


def test_a_pipe_beside_a_checkpoint_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert read_config_eps(tmp_path / "model.safetensors") == 1e-5
