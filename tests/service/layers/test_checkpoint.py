"""What a checkpoint and its surroundings say; the server with a checkpoint is in tests/integration."""

import json
import os

import pytest
from normserve.codec.safetensors import SafetensorsEntry
from normserve.errors import MalformedPayloadError
from normserve.jobs.job import Op
from normserve.layers import checkpoint
from normserve.layers.checkpoint import CheckpointConfig, find_norms, read_config


def configured(tmp_path, config: str | None) -> CheckpointConfig:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    return read_config(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "layer_eps", "rms_eps"),
    [
        (None, 1e-5, 1e-6),
        ("not json", 1e-5, 1e-6),
        ("[" * 100_000, 1e-5, 1e-6),
        ("[]", 1e-5, 1e-6),
        ('{"hidden_size": 8}', 1e-5, 1e-6),
        ('{"layer_norm_epsilon": 1e-9}', 1e-9, 1e-9),
        ('{"rms_norm_eps": 1e-4}', 1e-5, 1e-4),
        ('{"rms_norm_eps": 1e-4, "layer_norm_eps": 1e-9}', 1e-9, 1e-4),
        ('{"text_config": {"rms_norm_eps": 1e-4}, "layer_norm_eps": 1e-9}', 1e-9, 1e-4),
        ('{"text_config": null}', 1e-5, 1e-6),
    ],
)
def test_checkpoint_layers_have_the_eps_of_the_configuration_beside_it(config, layer_eps, rms_eps, tmp_path):
    assert configured(tmp_path, config).eps == {Op.LAYER_NORM: layer_eps, Op.RMS_NORM: rms_eps}


@pytest.mark.parametrize("eps", ["0.0", '"1e-5"', "-1.0", "NaN"])
@pytest.mark.parametrize("key", ["layer_norm_eps", "rms_norm_eps"])
def test_a_senseless_eps_beside_a_checkpoint_is_refused(key, eps, tmp_path):
    with pytest.raises(MalformedPayloadError, match=r"config\.json"):
        configured(tmp_path, f'{{"{key}": {eps}}}')


@pytest.mark.parametrize("eps", ['"' + "x" * 100_000 + '"', "1" * 4000, "[" * 500 + "]" * 500])
def test_the_error_of_a_long_eps_is_short(eps, tmp_path):
    with pytest.raises(MalformedPayloadError) as caught:
        configured(tmp_path, f'{{"norm_eps": {eps}}}')
    assert len(caught.value.detail) < 250


def test_a_very_long_configuration_is_refused(tmp_path):
    with pytest.raises(MalformedPayloadError, match="more than 4194304 bytes"):
        configured(tmp_path, '{"hidden_size": 8}' + " " * 2**22)


def test_a_pipe_beside_a_checkpoint_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert read_config(tmp_path / "model.safetensors") == CheckpointConfig()


@pytest.mark.parametrize(
    ("config", "offset"),
    [
        ({"model_type": "llama"}, 0.0),
        ({"model_type": "gemma2"}, 1.0),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, 1.0),
        ({"model_type": "gemma3n"}, 0.0),
        ({"model_type": ["gemma"]}, 0.0),
    ],
)
def test_models_whose_weights_are_differences_from_one_are_known(config, offset, tmp_path):
    assert configured(tmp_path, json.dumps(config)).weight_offset == offset


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next", "rms_norm_eps": 1e-6},
        {"model_type": "nemotron", "norm_eps": 1e-5},
        {"model_type": "recurrent_gemma", "rms_norm_eps": 1e-6},
        {"model_type": "any", "text_config": {"model_type": "qwen3_5_text"}},
    ],
)
@pytest.mark.parametrize("op_without_bias", [None, Op.RMS_NORM])
def test_norms_that_cannot_be_told_are_left_out(config, op_without_bias, tmp_path):
    tensors = entries(a__norm__weight=(4,), b__norm__weight=(4,), b__norm__bias=(4,))
    norms = list(find_norms(tensors, op_without_bias, configured(tmp_path, json.dumps(config))))
    assert [(norm.op, norm.reason) for norm in norms] == [(None, checkpoint.UNCLEAR_MODEL)] * 2


def entries(**shapes: tuple[int, ...]) -> dict[str, SafetensorsEntry]:
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: SafetensorsEntry(name, "F32", shape, 0, 0) for name, shape in named.items()}


@pytest.mark.parametrize(
    ("tensors", "name", "op"),
    [
        ({"a__norm__weight": (4,), "a__norm__bias": (4,)}, "a.norm", Op.LAYER_NORM),
        ({"a__ln_1__weight": (4,), "a__ln_1__bias": (4,)}, "a.ln_1", Op.LAYER_NORM),
        ({"LayerNorm__gamma": (4,), "LayerNorm__beta": (4,)}, "LayerNorm", Op.LAYER_NORM),
        ({"norm__0__weight": (4,), "norm__0__bias": (4,)}, "norm.0", Op.LAYER_NORM),
        ({"final_rmsnorm__weight": (4,)}, "final_rmsnorm", Op.RMS_NORM),
        ({"RMSNorm_0__gamma": (4,)}, "RMSNorm_0", Op.RMS_NORM),
    ],
)
def test_a_norm_is_known_by_its_name_and_its_bias(tensors, name, op):
    (norm,) = find_norms(entries(**tensors), None, CheckpointConfig())
    assert (norm.name, norm.op, norm.bias is None, norm.reason) == (name, op, op is Op.RMS_NORM, "")


def test_without_a_bias_the_setting_decides_and_then_the_configuration():
    llama = entries(model__norm__weight=(4,))
    for op_without_bias, config, op, reason in (
        (None, CheckpointConfig(), None, checkpoint.NO_BIAS),
        (None, CheckpointConfig(has_rms_norms=True), Op.RMS_NORM, ""),
        (Op.RMS_NORM, CheckpointConfig(), Op.RMS_NORM, ""),
        (Op.LAYER_NORM, CheckpointConfig(has_rms_norms=True), Op.LAYER_NORM, ""),
    ):
        (norm,) = find_norms(llama, op_without_bias, config)
        assert (norm.op, norm.reason) == (op, reason)


def test_with_a_bias_the_setting_decides_nothing():
    (norm,) = find_norms(entries(norm__weight=(4,), norm__bias=(4,)), Op.RMS_NORM, CheckpointConfig())
    assert norm.op is Op.LAYER_NORM


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"norm__weight": (4,), "norm__bias": (4,), "norm__running_mean": (4,)}, checkpoint.BATCH_NORM),
        ({"norm__weight": (4, 4), "norm__bias": (4, 4)}, checkpoint.NO_VECTOR),
        ({"norm__weight": (0,), "norm__bias": (0,)}, checkpoint.NO_VECTOR),
        ({"norm__weight": (4,), "norm__bias": (5,)}, checkpoint.OTHER_BIAS),
        ({"n" * 200 + "_norm__weight": (4,), "n" * 200 + "_norm__bias": (4,)}, checkpoint.NO_LAYER_NAME),
    ],
)
def test_what_is_left_out_has_a_reason(tensors, reason):
    (norm,) = find_norms(entries(**tensors), None, CheckpointConfig())
    assert (norm.op, norm.reason) == (None, reason)


@pytest.mark.parametrize(
    "tensors",
    [
        {"dense__weight": (4,), "dense__bias": (4,)},
        {"aln__dense__weight": (4,)},
        {"norm1__linear__weight": (8, 4), "norm1__linear__bias": (8,)},
        {"norm__bias": (4,)},
        {"norm": (4,)},
    ],
)
def test_other_tensors_are_no_norms(tensors):
    assert list(find_norms(entries(**tensors), Op.RMS_NORM, CheckpointConfig(has_rms_norms=True))) == []
