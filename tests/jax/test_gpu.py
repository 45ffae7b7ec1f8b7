"""On a GPU: bits of the same plan's kernels as torch launches them, large arrays, and two devices."""

from dataclasses import replace

import fusednorm.jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusednorm.arguments.options import NormOptions
from fusednorm.jax.kernel_plans import describe_gpu, plan_launches
from fusednorm.jax.passes import SEED, BackwardPass, ForwardPass
from fusednorm.jax.primitive import run_pass

pytestmark = pytest.mark.gpu

FUSED = {"activation": "silu", "dropout": 0.1, "seed": (1 << 40) + 1}


def rows(*shape, residual=False, bias=True):
    shapes = {"x": shape, "weight": shape[-1:]}
    return shapes | ({"bias": shape[-1:]} if bias else {}) | ({"residual": shape} if residual else {})


def images(*shape, channels_last=False, modulated=False):
    channels = shape[-1 if channels_last else 1]
    shapes = {"x": shape, "weight": (channels,), "bias": (channels,)}
    return shapes | (dict.fromkeys(("scale", "shift"), (shape[0], channels)) if modulated else {})


CASES = {
    "rows of 1024": ("layer_norm", {}, rows(1000, 1024)),
    "rows of 1000": ("layer_norm", FUSED, rows(333, 1000)),
    "odd rows": ("layer_norm", {}, rows(77, 1235)),
    "rows of 8192": ("rms_norm", {}, rows(512, 8192, bias=False)),
    "rows of 16384": ("rms_norm", {}, rows(300, 16384, residual=True, bias=False)),
    "rows of 16000": ("layer_norm", {}, rows(77, 16000)),
    "rows of 20000": ("layer_norm", {}, rows(64, 20000)),
    "rows of 131072": ("rms_norm", {}, rows(16, 131072, bias=False)),
    "a row of 2^20": ("layer_norm", {}, rows(1, 1 << 20)),
    "rows of 2^20": ("layer_norm", {}, rows(8, 1 << 20)),
    "sums": ("rms_norm", {"weight_offset": 1.0}, rows(512, 4096, residual=True, bias=False)),
    "long sums": ("layer_norm", {}, rows(64, 40000, residual=True)),
    "samples": ("layer_norm", FUSED, rows(4, 100, 1152) | dict.fromkeys(("scale", "shift"), (4, 1152))),
    "gated samples": (
        "layer_norm", {}, rows(4, 100, 1152, residual=True) | dict.fromkeys(("scale", "shift", "gate"), (4, 1152)),
    ),
    "heads": ("rms_norm", {}, {"x": (100, 16, 128), "weight": (16, 128)}),
    "channels": ("layer_norm", {"layout": "nchw"}, images(4, 96, 28, 29)),
    "many channels": ("layer_norm", {"layout": "nchw"}, images(2, 3000, 7, 7, modulated=True)),
    "groups": ("group_norm", {"activation": "silu"}, images(2, 320, 64, 64)),
    "small groups": ("group_norm", FUSED, images(64, 64, 3, 5)),
    "odd groups": ("group_norm", {"activation": "silu"}, images(3, 96, 17, 19)),
    "large groups": ("group_norm", FUSED, images(1, 512, 256, 256, modulated=True)),
    "many samples": ("group_norm", {}, images(3000, 32, 8, 8)),
    "channels last": ("group_norm", {"activation": "silu"}, images(2, 64, 64, 320, channels_last=True)),
    "few positions": ("group_norm", FUSED, images(4, 8, 8, 1280, channels_last=True, modulated=True)),
    "odd channels last": ("group_norm", {}, images(2, 50, 50, 96, channels_last=True)),
    "large channels last": ("group_norm", {"activation": "silu"}, images(1, 512, 512, 128, channels_last=True)),
}  # fmt: skip


def draw(shapes, dtype):
    generator = np.random.default_rng(0)
    return {name: jnp.asarray(generator.standard_normal(shape), dtype) for name, shape in shapes.items()}


def run_with_seed(norm_pass, inputs, seed):
    """Run a pass by JAX, with the seed of its options as an array."""
    given = inputs | seed
    return run_pass(replace(norm_pass, names=tuple(given)), given)


def run_by_torch(norm_pass, inputs):
    """Run the plan of a pass for JAX by torch's launches, on the same bits; the seed is a number."""
    torch = pytest.importorskip("torch")
    from fusednorm.launch.execution import run_launches

    def convert(array):
        return torch.from_dlpack(array) if array.size else torch.empty(array.shape)

    tensors = {name: convert(array) for name, array in inputs.items()}
    results = {
        name: torch.full(result.shape, float("nan"), dtype=getattr(torch, str(result.dtype)), device="cuda")
        for name, result in norm_pass.list_results(inputs).items()
    }
    launches = plan_launches(norm_pass, inputs, describe_gpu())
    torch.cuda.synchronize()
    run_launches(torch.device("cuda", 0), launches, tensors | results)
    torch.cuda.synchronize()
    return {name: jnp.from_dlpack(result) for name, result in results.items()}


def assert_same_bits(results, wanted):
    assert results.keys() == wanted.keys()
    for name, result in results.items():
        bits = {2: np.uint16, 4: np.uint32}[result.dtype.itemsize]
        pairs = np.asarray(result).view(bits), np.asarray(wanted[name]).view(bits)
        assert (pairs[0] == pairs[1]).all(), f"{name}: {(pairs[0] != pairs[1]).sum()} of {pairs[0].size} differ"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_both_passes_have_the_bits_of_torch_launching_the_same_plan(name, dtype):
    op, values, shapes = CASES[name]
    options = NormOptions(op, 32 if op == "group_norm" else 0, **values).validate()
    channels_last = "last" in name or name == "few positions"
    inputs = draw(shapes, dtype)
    seed = {SEED: jnp.array([1, 1 << 8], jnp.uint32)} if options.dropout else {}
    forward = ForwardPass(options, channels_last, tuple(inputs), True)
    compute = jax.jit(run_with_seed, static_argnums=0)
    results = compute(forward, inputs, seed)
    assert_same_bits(results, run_by_torch(forward, inputs))
    saved = {statistic: results[statistic] for statistic in ("mean", "rstd") if statistic in results}
    given = inputs | saved | {"dy": draw({"dy": shapes["x"]}, dtype)["dy"]}
    if "residual_out" in results:
        given["dresidual_out"] = results["residual_out"]
    backward = BackwardPass(options, channels_last, tuple(given), True)
    first = compute(backward, given, seed)
    assert_same_bits(first, run_by_torch(backward, given))
    assert_same_bits(first, compute(backward, given, seed))


def test_an_array_of_more_than_2_31_elements():
    x = jnp.ones((1 << 20, 2048 + 8), jnp.bfloat16).at[-1].set(jnp.arange(2056) % 7)
    y = jax.jit(fusednorm.jax.layer_norm)(x)
    assert not np.asarray(y[0], np.float32).any()
    assert (
        np.abs(np.asarray(y[-1], np.float32) - np.asarray(fusednorm.jax.layer_norm(x[-1:])[0], np.float32)).max()
        == 0
    )


def test_layers_of_a_model_do_not_share_their_buffers():
    """Many calls of one program, whose outputs start with no value."""
    x, weights = draw({"x": (256, 1024)}, "float32")["x"], draw({"w": (6, 1024)}, "float32")["w"]

    def apply(norm):
        def model(x, weights):
            h = x
            for weight in weights:
                y, h = norm(jnp.tanh(h), h, weight)
                h = h + y
            return (h * jnp.cos(jnp.arange(1024))).sum()

        return jax.jit(jax.value_and_grad(model, (0, 1)))(x, weights)

    def formula(x, residual, weight):
        h = x + residual
        return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * weight, h

    for value, wanted in zip(
        jax.tree.leaves(apply(fusednorm.jax.add_rms_norm)), jax.tree.leaves(apply(formula)), strict=True
    ):
        assert jnp.abs(value - wanted).max() <= 2e-4 * (1.0 + jnp.abs(wanted).max())


def test_a_scan_of_layers():
    x, weights = draw({"x": (256, 1024)}, "float32")["x"], draw({"w": (6, 1024)}, "float32")["w"]

    def apply(norm):
        def model(x, weights):
            return jax.lax.scan(lambda h, weight: (h + norm(h, weight), None), x, weights)[0].sum()

        return jax.jit(jax.value_and_grad(model, (0, 1)))(x, weights)

    def formula(x, weight):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    for value, wanted in zip(
        jax.tree.leaves(apply(fusednorm.jax.rms_norm)), jax.tree.leaves(apply(formula)), strict=True
    ):
        assert jnp.abs(value - wanted).max() <= 2e-4 * (1.0 + jnp.abs(wanted).max())


def test_a_program_copies_no_array():
    """XLA allocates what kernels write, and gives it on as it is."""
    inputs = draw({"x": (4, 64, 1024), "weight": (1024,), "scale": (4, 1024), "shift": (4, 1024)}, "bfloat16")

    def loss(inputs):
        return fusednorm.jax.layer_norm(**inputs, activation="silu").astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss)).trace(inputs).lower().compile().as_text()
    assert "triton_kernel_call_ffi" in program
    assert " copy(" not in program


def test_each_of_two_gpus_computes_its_arrays():
    gpus = jax.devices("gpu")
    if len(gpus) < 2:
        pytest.skip("there is one GPU")
    x = draw({"x": (64, 1024)}, "float32")["x"]
    first, second = (jax.jit(fusednorm.jax.layer_norm)(jax.device_put(x, gpu)) for gpu in gpus[:2])
    assert second.devices() == {gpus[1]}
    assert (np.asarray(first) == np.asarray(second)).all()
