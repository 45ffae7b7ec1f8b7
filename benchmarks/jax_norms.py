"""Measures `fusednorm.jax` on a GPU beside XLA's own fusion of the same formula, and tokamax where it is installed.

Usage: python -m benchmarks.jax_norms --out benchmarks/results/jax_norms.csv [--only TEXT]

Torch is not needed.  A time is that of one call among many, which a compiled function makes of inputs that take
turns: x alone is larger than L2, so that each call reads memory, and the host is ahead of the device.  Backward is
the difference of both passes in one program and the forward pass in its own, as in training.  `of_copy` compares
the rate of the bytes that a pass must read and write with the rate at which XLA negates x; `of_xla` is XLA's time
by this.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import util
from statistics import median
from typing import Any

import fusednorm.jax
import jax
import jax.numpy as jnp

from benchmarks.harness.csv_results import CsvResults, add_output_options

X_BYTES = 256 << 20
CALLS, REPEATS = 20, 9
COLUMNS = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
IMAGES = ((320, 64, 64), (640, 32, 32), (1280, 16, 16), (512, 64, 64), (256, 128, 128), (128, 256, 256))
"""Channels, height and width: UNets and decoders of diffusion models."""

SCAN_COLUMNS, LAYERS = (1024, 4096), 12
"""Columns and layers of a model whose layers are a norm and an activation, without products of matrices."""

FIELDS = ("operation", "shape", "dtype", "provider", "pass", "us", "of_copy", "of_xla")

Norm = Callable[..., jax.Array]


@dataclass(frozen=True)
class NormCase:
    """An operation and the shape of its x, with its implementations.

    Attributes:
        operation: its name in the table.
        shape: x's.
        channels: the length of weight and bias.
        has_bias: whether there is a bias.
        providers: functions of x, weight and bias, by the names of their libraries.
        layers: the number of weights and biases, which are then [layers, channels]; 0 for one without an axis.
    """

    operation: str
    shape: tuple[int, ...]
    channels: int
    has_bias: bool
    providers: dict[str, Norm]
    layers: int = 0

    def draw(self, dtype: Any, seed: int) -> tuple[jax.Array, ...]:
        """Draw x and the parameters."""
        keys = jax.random.split(jax.random.key(seed), 3)
        parameter = (self.layers, self.channels) if self.layers else (self.channels,)
        shapes = (self.shape, parameter, parameter)[: 3 if self.has_bias else 2]
        return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False))


def list_cases() -> Iterator[NormCase]:
    """Yield all cases; x has about X_BYTES bytes in bfloat16."""
    for cols in COLUMNS:
        shape = (X_BYTES // 2 // cols, cols)
        yield NormCase("layer_norm", shape, cols, True, _list_row_providers("layer_norm"))
        yield NormCase("rms_norm", shape, cols, False, _list_row_providers("rms_norm"))
    for channels, height, width in IMAGES:
        samples = max(1, X_BYTES // 2 // (channels * height * width))
        for layout in ("nchw", "nhwc"):
            places = (channels, height, width) if layout == "nchw" else (height, width, channels)
            providers = {"fusednorm": _make_group_norm(layout), "xla": _make_group_formula(layout)}
            yield NormCase(f"group_norm+silu {layout}", (samples, *places), channels, True, providers)
    for cols in SCAN_COLUMNS:
        shape = (X_BYTES // 2 // cols, cols)
        of_layers = {"fusednorm": fusednorm.jax.add_layer_norm, "xla": _add_and_compute_layer_norm}
        providers = {library: scan_layers(add_norm) for library, add_norm in of_layers.items()}
        yield NormCase(f"scan of {LAYERS} add_layer_norm", shape, cols, True, providers, LAYERS)


def _list_row_providers(operation: str) -> dict[str, Norm]:
    providers: dict[str, Norm]
    if operation == "rms_norm":
        providers = {"fusednorm": fusednorm.jax.rms_norm, "xla": compute_rms_norm}
    else:
        providers = {"fusednorm": fusednorm.jax.layer_norm, "xla": compute_layer_norm}
    if util.find_spec("tokamax") is not None:
        import tokamax

        # By default it computes what its kernel refuses by XLA.
        kernel = partial(tokamax.layer_norm, implementation="triton")
        if operation == "rms_norm":
            providers["tokamax"] = lambda x, weight: kernel(x, weight, None, epsilon=1e-6, subtract_mean=False)
        else:
            providers["tokamax"] = partial(kernel, epsilon=1e-5)
    return providers


def compute_layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Compute LayerNorm in jax.numpy, in float32."""
    h = x.astype(jnp.float32)
    centred = h - h.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + 1e-5)
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def compute_rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute RMSNorm in jax.numpy, in float32."""
    h = x.astype(jnp.float32)
    y = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def _add_and_compute_layer_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    h = residual.astype(jnp.float32) + x.astype(jnp.float32)
    return compute_layer_norm(h, weight, bias).astype(x.dtype), h.astype(residual.dtype)


def scan_layers(add_norm: Callable[..., Any]) -> Norm:
    """Make a scan over layers, each of which adds to a residual, normalises the sum, and applies tanh."""

    def apply(carry: tuple[jax.Array, jax.Array], parameters: tuple[jax.Array, ...]) -> Any:
        y, h = add_norm(*carry, *parameters)
        return (jnp.tanh(y), h), None

    def compute(x: jax.Array, *parameters: jax.Array) -> jax.Array:
        (y, h), _ = jax.lax.scan(apply, (x, x), parameters)
        return y + h

    return compute


def _make_group_norm(layout: Any) -> Norm:
    def compute(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return fusednorm.jax.group_norm(x, 32, weight, bias, activation="silu", layout=layout)

    return compute


def _make_group_formula(layout: str) -> Norm:
    """Make GroupNorm and SiLU in jax.numpy, in float32."""

    def compute(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        n, channels = x.shape[0], weight.size
        if layout == "nchw":
            view, axes, affine = (n, 32, channels // 32, -1), (2, 3), (1, 32, channels // 32, 1)
        else:
            view, axes, affine = (n, -1, 32, channels // 32), (1, 3), (1, 1, 32, channels // 32)
        h = x.astype(jnp.float32).reshape(view)
        centred = h - h.mean(axes, keepdims=True)
        variance = (centred * centred).mean(axes, keepdims=True)
        z = centred * jax.lax.rsqrt(variance + 1e-5)
        z = z * weight.astype(jnp.float32).reshape(affine) + bias.astype(jnp.float32).reshape(affine)
        return jax.nn.silu(z).reshape(x.shape).astype(x.dtype)

    return compute


def make_both_passes(norm: Norm) -> Callable[..., Any]:
    """Make a function of dy and the inputs that returns y and all gradients."""

    def compute(dy: jax.Array, *inputs: jax.Array) -> Any:
        y, differentiate = jax.vjp(norm, *inputs)
        return y, differentiate(dy)

    return compute


def measure_us(function: Callable[..., Any], turns: list[tuple[jax.Array, ...]]) -> float:
    """Measure a function's time for one call, the median of REPEATS times CALLS calls of inputs that take turns."""
    compiled = jax.jit(function)
    jax.block_until_ready([compiled(*inputs) for inputs in turns])
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for number in range(CALLS):
            result = compiled(*turns[number % len(turns)])
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return median(times)


def measure_case(case: NormCase, dtype: Any) -> Iterator[dict[str, Any]]:
    """Measure both passes of a case by each provider, and yield rows of the table."""
    turns = [case.draw(dtype, seed) for seed in range(2)]
    copy_us = measure_us(jnp.negative, [inputs[:1] for inputs in turns])
    with_dy = [(turns[1 - number][0], *inputs) for number, inputs in enumerate(turns)]
    xla: dict[str, float] = {}
    # XLA first: the others are compared with it.
    for provider in sorted(case.providers, key=lambda name: name != "xla"):
        norm = case.providers[provider]
        try:
            forward_us = measure_us(norm, turns)
            both_us = measure_us(make_both_passes(norm), with_dy)
        except Exception as error:
            print(f"{case.operation} {case.shape} {provider}: {error}", file=sys.stderr)
            continue
        # Backward reads dy and x and writes dx: half as much again as a copy.
        for name, us, copies in (("forward", forward_us, 1.0), ("backward", both_us - forward_us, 1.5)):
            if provider == "xla":
                xla[name] = us
            yield {
                "operation": case.operation,
                "shape": "x".join(map(str, case.shape)),
                "dtype": jnp.dtype(dtype).name,
                "provider": provider,
                "pass": name,
                "us": f"{us:.1f}",
                "of_copy": "" if case.layers else f"{copies * copy_us / us:.3f}",
                "of_xla": f"{xla[name] / us:.2f}" if name in xla else "",
            }


def main() -> None:
    """Measure the cases, print each row, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--only", default="", help="measure only operations whose names contain this")
    parser.add_argument("--dtype", default="bfloat16", help="of all arrays (default bfloat16)")
    arguments = parser.parse_args()
    results = CsvResults(arguments.out, FIELDS, arguments.commit, ("jax", "triton", "tokamax"))
    for case in list_cases():
        if arguments.only in case.operation:
            for row in measure_case(case, jnp.dtype(arguments.dtype)):
                results.add_row(row)
                print(*row.values(), sep="  ", flush=True)


if __name__ == "__main__":
    main()
