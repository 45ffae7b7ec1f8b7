"""Registration of the norm layers of a safetensors checkpoint."""

import asyncio
import json
import logging
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normserve.codec.safetensors import CHECKPOINT_LIMITS, SafetensorsEntry, read_entries
from normserve.engine.engine import Engine
from normserve.errors import ConfigurationError, MalformedPayloadError, NormserveError, TooLargeError
from normserve.jobs.job import NormSpec, Op, PassDirection, RegisteredLayer
from normserve.layers.registry import LAYER_NAMES, LayerRegistry, is_layer_name
from normserve.memory.tensors import HostTensor
from normserve.regular_files import open_regular_file

log = logging.getLogger(__name__)

# `ln` as a word of its own: ln_1, ln_f, attn.ln, ln2; not the middle of another word.
_NAMES_A_NORM = re.compile(r"norm|(?:^|[._])ln(?:$|[._\d])", re.IGNORECASE)
_NAMES_AN_RMS_NORM = re.compile(r"rms", re.IGNORECASE)
# Names of a layer's tensors; the second ones are those of checkpoints that were converted from TensorFlow.
_PARAMETER_NAMES = (("weight", "bias"), ("gamma", "beta"))

# Names of the eps in the configurations of published checkpoints, and the eps without one.
_RMS_EPS_KEY = "rms_norm_eps"
_EPS_KEYS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_DEFAULT_EPS = {Op.LAYER_NORM: 1e-5, Op.RMS_NORM: 1e-6}
# Models whose RMSNorms all store their weights as differences from one.
_OFFSET_MODEL_TYPES = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
# Models some or all of whose norms are not what their tensors' names and shapes say: weights are differences from
# one, or norms are over groups of columns.
_UNCLEAR_MODEL_TYPES = frozenset(
    (
        *("falcon_h1", "minimax_m3_vl", "minimax_m3_vl_text", "muse_glimmer", "muse_glimmer_text", "muse_spark"),
        *("muse_spark_text", "nemotron", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "step3p5", "step3p7"),
        *("t5_gemma_module", "t5gemma", "t5gemma2", "t5gemma2_decoder", "t5gemma2_encoder", "t5gemma2_text"),
        *("vaultgemma", "videoprism", "videoprism_text_model", "videoprism_vision_model", "zamba2"),
    )
)

# Enough for the names of 20,000 classes; parsed, a file of brackets takes many times its size.
_MAX_CONFIG_BYTES = 4 * 2**20
_MAX_NAMED = 4

# Reasons for which a norm is left out.
NO_BIAS = (
    "they have no bias, and neither their names nor config.json say that they are RMSNorms;"
    " --checkpoint-op says what they are"
)
BATCH_NORM = "their running means make them BatchNorms"
NO_VECTOR = "their weights are no vectors"
OTHER_BIAS = "their biases have other shapes than their weights"
UNCLEAR_MODEL = (
    "by its model_type in config.json, some weights may be differences from one, or some norms over groups of"
    " columns; PUT /v1/layers/{name} registers them"
)
NO_LAYER_NAME = f"a layer's name must be {LAYER_NAMES}"


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What the `config.json` beside a checkpoint says about its norms.

    Attributes:
        eps: by operation.
        has_rms_norms: whether norms without a bias are RMSNorms.
        weight_offset: of RMSNorms.
        is_unclear: whether the model's norms may be others than their tensors say.
    """

    eps: Mapping[Op, float] = field(default_factory=lambda: _DEFAULT_EPS)
    has_rms_norms: bool = False
    weight_offset: float = 0.0
    is_unclear: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointNorm:
    """A norm among a checkpoint's tensors.

    Attributes:
        op: the operation; None if it is left out.
        bias: None without one.
        reason: why it is left out; "" if it is not.
    """

    name: str
    op: Op | None
    weight: SafetensorsEntry
    bias: SafetensorsEntry | None
    reason: str = ""


async def register_checkpoint(
    path: Path, op_without_bias: Op | None, engine: Engine, layers: LayerRegistry
) -> None:
    """Register the norms of a safetensors checkpoint under their names, and warn of those that are left out.

    A norm is a vector NAME.weight, whose NAME contains norm or ln.  With NAME.bias it is a LayerNorm.  Options are
    those of a `config.json` beside the file.

    Args: op_without_bias: the operation of norms without a bias; None if their names or the configuration decide.

    Raises:
        ConfigurationError: the file cannot be read, its parameters are invalid, or they exceed a limit.
        NormserveError: the device could not take them.
    """
    try:
        config = await asyncio.to_thread(read_config, path)
        body, entries = await asyncio.to_thread(_map_checkpoint, path)
        norms = list(find_norms(entries, op_without_bias, config))
        found = [
            (
                norm.name,
                norm.op,
                norm.weight.view_tensor(body),
                None if norm.bias is None else norm.bias.view_tensor(body),
            )
            for norm in norms
            if norm.op is not None
        ]
    except OSError as error:
        raise ConfigurationError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    except NormserveError as error:
        raise ConfigurationError(f"the checkpoint {path}: {error.detail}") from error
    for name, op, weight, bias in found:
        offset = config.weight_offset if op is Op.RMS_NORM else 0.0
        spec = NormSpec(op, PassDirection.FORWARD, config.eps[op], weight_offset=offset)
        try:
            await _register_norm(name, spec, weight, bias, engine, layers)
        except TooLargeError as error:
            raise ConfigurationError(f"the checkpoint {path}: {error.detail}") from error
    _log_norms(path, norms, config)


async def _register_norm(
    name: str, spec: NormSpec, weight: HostTensor, bias: HostTensor | None, engine: Engine, layers: LayerRegistry
) -> None:
    """Load a norm's parameters onto the device, and register it.

    Raises:
        TooLargeError: the limit of layers, or of bytes, is reached.
    """
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    with layers.reserve(name, nbytes):
        resident = await engine.load_parameters(spec.op, weight, bias)
    layers.put_or_replace(
        RegisteredLayer(name, spec, weight.shape[0], weight.dtype, bias is not None, nbytes, resident)
    )


def _map_checkpoint(path: Path) -> tuple[memoryview, dict[str, SafetensorsEntry]]:
    """Map a checkpoint into memory; return its bytes, without a copy, and its tensors by name."""
    with open_regular_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise MalformedPayloadError("the file is empty")
        # Copy on write: torch wants memory that it could write to.
        body = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return body, {entry.name: entry for entry in read_entries(body, CHECKPOINT_LIMITS)}


def read_config(path: Path) -> CheckpointConfig:
    """Read the `config.json` beside a checkpoint, or the part of it about a text model; without one, everything
    has its default.

    Raises:
        MalformedPayloadError: an eps is no number in (0, 1), or the file is longer than 4 MiB.
    """
    try:
        with open_regular_file(path.parent / "config.json") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise MalformedPayloadError(f"config.json beside it has more than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return CheckpointConfig()
    if not isinstance(config, dict):
        return CheckpointConfig()
    text_config = config.get("text_config")
    text_config = text_config if isinstance(text_config, dict) else {}
    named = (each.get("model_type") for each in (config, text_config))
    model_types = {each for each in named if isinstance(each, str)}
    config = text_config | config
    eps = {
        Op.LAYER_NORM: _find_eps(config, _EPS_KEYS, Op.LAYER_NORM),
        Op.RMS_NORM: _find_eps(config, (_RMS_EPS_KEY, *_EPS_KEYS), Op.RMS_NORM),
    }
    return CheckpointConfig(
        eps,
        _RMS_EPS_KEY in config,
        1.0 if model_types & _OFFSET_MODEL_TYPES else 0.0,
        not model_types.isdisjoint(_UNCLEAR_MODEL_TYPES),
    )


def _find_eps(config: dict[str, Any], keys: tuple[str, ...], op: Op) -> float:
    """Return the eps that a configuration has under the first of these keys; without one, the operation's default.

    Raises:
        MalformedPayloadError: it is no number in (0, 1).
    """
    eps = next((config[key] for key in keys if key in config), _DEFAULT_EPS[op])
    if not isinstance(eps, float) or not 0.0 < eps < 1.0:
        shown = type(eps).__name__ if isinstance(eps, list | dict) else repr(eps)[:100]
        raise MalformedPayloadError(f"config.json beside it has the eps {shown}, expected a number in (0, 1)")
    return eps


def find_norms(
    entries: Mapping[str, SafetensorsEntry], op_without_bias: Op | None, config: CheckpointConfig
) -> Iterator[CheckpointNorm]:
    """Yield the norms among a checkpoint's tensors, also those that are left out.

    Args: op_without_bias: the operation of norms without a bias; None if their names or the configuration decide.
    """
    for key, weight in entries.items():
        for weight_name, bias_name in _PARAMETER_NAMES:
            name = key.removesuffix(f".{weight_name}")
            # A weight that is no vector, of a layer within one that is called a norm, is a projection's.
            called = name if len(weight.shape) == 1 else name.rpartition(".")[2]
            if name == key or not _NAMES_A_NORM.search(called):
                continue
            bias = entries.get(f"{name}.{bias_name}")
            op: Op | None = Op.LAYER_NORM
            if bias is None:
                is_rms_norm = config.has_rms_norms or _NAMES_AN_RMS_NORM.search(name)
                op = op_without_bias or (Op.RMS_NORM if is_rms_norm else None)
            reason = _find_reason_against(name, weight, bias, is_batch_norm=f"{name}.running_mean" in entries)
            if config.is_unclear:
                reason = reason or UNCLEAR_MODEL
            if op is None:
                reason = reason or NO_BIAS
            yield CheckpointNorm(name, None if reason else op, weight, bias, reason)


def _find_reason_against(
    name: str, weight: SafetensorsEntry, bias: SafetensorsEntry | None, *, is_batch_norm: bool
) -> str:
    """Return why a norm cannot be registered, whatever its operation; "" if it can."""
    if is_batch_norm:
        return BATCH_NORM
    if len(weight.shape) != 1 or not weight.shape[0]:
        return NO_VECTOR
    if bias is not None and bias.shape != weight.shape:
        return OTHER_BIAS
    return "" if is_layer_name(name) else NO_LAYER_NAME


def _log_norms(path: Path, norms: list[CheckpointNorm], config: CheckpointConfig) -> None:
    """Log how many norms were registered, and a warning for each reason for which others were left out."""
    counts = Counter(norm.op for norm in norms if norm.op is not None)
    described = [f"{count} of {op.value} with eps {config.eps[op]:g}" for op, count in counts.items()]
    log.info("registered %d layers from %s%s", counts.total(), path, "".join(f", {each}" for each in described))
    for reason in dict.fromkeys(norm.reason for norm in norms if norm.reason):
        # A name may have any characters, and break the log's lines.
        names = [ascii(norm.name)[1:-1] for norm in norms if norm.reason == reason]
        shown = ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
        log.warning("%d norms of %s are left out: %s: %s", len(names), path, reason, shown)
    if not norms:
        log.warning("%s has no norms: no tensor is called NAME.weight with norm or ln in NAME", path)
