"""Registration of the norm layers of a safetensors checkpoint."""

import asyncio
import json
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from normserve.codec.safetensors import CHECKPOINT_LIMITS, SafetensorsEntry, read_entries
from normserve.engine.engine import Engine
from normserve.errors import ConfigurationError, MalformedPayloadError, NormserveError, TooLargeError
from normserve.jobs.job import NormSpec, Op, PassDirection, RegisteredLayer
from normserve.layers.registry import LayerRegistry, is_layer_name
from normserve.memory.tensors import HostTensor
from normserve.regular_files import open_regular_file

log = logging.getLogger(__name__)

# `ln` as a word of its own: ln_1, ln_f, attn.ln, ln2; not the middle of another word.
_NAMES_A_NORM = re.compile(r"norm|(?:^|[._])ln(?:$|[._\d])", re.IGNORECASE)
_DEFAULT_EPS = 1e-5
# Names of the eps in the configurations of published checkpoints.
_EPS_KEYS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


async def register_checkpoint_layer_norms(path: Path, engine: Engine, layers: LayerRegistry) -> None:
    """Register the LayerNorms of a safetensors checkpoint: the layer NAME for each pair NAME.weight, NAME.bias.

    Both must be of rank 1, and NAME must contain norm or ln.  Their eps is that of a `config.json`
    beside the file, 1e-5 without one.

    Raises:
        ConfigurationError: the file cannot be read, its parameters are invalid, or they exceed a limit.
        NormserveError: the device could not take them.
    """
    try:
        found = await asyncio.to_thread(_map_layer_norm_parameters, path)
        eps = await asyncio.to_thread(read_config_eps, path)
    except OSError as error:
        raise ConfigurationError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    except NormserveError as error:
        raise ConfigurationError(f"the checkpoint {path}: {error.detail}") from error
    for name, weight, bias in found:
        nbytes = weight.nbytes + bias.nbytes
        try:
            with layers.reserve(name, nbytes):
                resident = await engine.load_parameters(Op.LAYER_NORM, weight, bias)
        except TooLargeError as error:
            raise ConfigurationError(f"the checkpoint {path}: {error.detail}") from error
        spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps)
        layers.put_or_replace(RegisteredLayer(name, spec, weight.shape[0], weight.dtype, True, nbytes, resident))
    log.info("registered %d layers from %s with eps %g", len(layers), path, eps)


def _map_layer_norm_parameters(path: Path) -> list[tuple[str, HostTensor, HostTensor]]:
    """Map a checkpoint into memory; return the name, weight and bias of each LayerNorm in it, without copies."""
    with open_regular_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise MalformedPayloadError("the file is empty")
        # Copy on write: torch wants memory that it could write to.
        body = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    entries = {entry.name: entry for entry in read_entries(body, CHECKPOINT_LIMITS)}
    return [
        (name, weight.view_tensor(body), bias.view_tensor(body))
        for name, weight, bias in _find_layer_norm_pairs(entries)
    ]


def read_config_eps(path: Path) -> float:
    """Read the eps in a `config.json` beside the checkpoint; 1e-5 if there is no such file or no eps in it.

    Raises:
        MalformedPayloadError: the eps is no number in (0, 1).
    """
    try:
        with open_regular_file(path.parent / "config.json") as file:
            config = json.loads(file.read())
    except (OSError, ValueError):
        return _DEFAULT_EPS
    named = [config[key] for key in _EPS_KEYS if key in config] if isinstance(config, dict) else []
    if not named:
        return _DEFAULT_EPS
    if not isinstance(named[0], float) or not 0.0 < named[0] < 1.0:
        raise MalformedPayloadError(f"config.json beside it has the eps {named[0]!r}, expected a number in (0, 1)")
    return named[0]


def _find_layer_norm_pairs(
    entries: dict[str, SafetensorsEntry],
) -> Iterator[tuple[str, SafetensorsEntry, SafetensorsEntry]]:
    """Yield the name, weight and bias of each LayerNorm: two vectors of equal length, named NAME.weight
    and NAME.bias.

    NAME must contain norm or ln.

    BatchNorms, which have a running mean, are left out.
    """
    for key, weight in entries.items():
        name = key.removesuffix(".weight")
        bias = entries.get(f"{name}.bias")
        # A running mean makes it a BatchNorm, which is another operation.
        if name == key or bias is None or f"{name}.running_mean" in entries:
            continue
        is_pair = len(weight.shape) == 1 and weight.shape == bias.shape and weight.shape[0] > 0
        if is_pair and _NAMES_A_NORM.search(name) and is_layer_name(name):
            yield name, weight, bias
