"""JAX's transformations: each gives what the same transformation of the formula gives."""

from functools import partial

import fusednorm.jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusednorm.jax import calls
from jax import lax
from jax.sharding import Mesh, PartitionSpec

B, ROWS, COLS = 3, 4, 24


def formula(x, weight=None, scale=None):
    """LayerNorm in jax.numpy."""
    centred = x - x.mean(-1, keepdims=True)
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    y = y if weight is None else y * weight
    return y if scale is None else y * (1.0 + scale[..., None, :])


def loss(norm, *arrays):
    y = norm(*arrays)
    return (y**3 * jnp.cos(jnp.arange(y.shape[-1]))).sum()


def draw(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape) * 2.0 + 0.5


def norm(x, weight=None, scale=None):
    return fusednorm.jax.layer_norm(x, weight, scale=scale)


XS, WEIGHT, WEIGHTS, SCALES = draw(B, ROWS, COLS), draw(COLS), draw(B, COLS), draw(B, COLS)

GRADIENT = partial(jax.grad, argnums=(1, 2))
TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f)(XS, WEIGHT),
    "vmap": lambda f: jax.vmap(f, (0, None))(XS, WEIGHT),
    "vmap of another axis": lambda f: jax.vmap(f, (1, None), 1)(XS, WEIGHT),
    "vmap of parameters": lambda f: jax.vmap(f, (None, 0))(XS[0], WEIGHTS),
    "vmap of all": lambda f: jax.vmap(f)(XS, WEIGHTS),
    "vmap of scale": lambda f: jax.vmap(f, (None, None, 0))(XS[0], WEIGHT, SCALES),
    "vmap of samples": lambda f: jax.vmap(f, (0, None, 0))(XS, WEIGHT, SCALES),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f, (0, None)), (0, None))(XS, WEIGHT),
    "grad": lambda f: GRADIENT(loss)(f, XS, WEIGHT),
    "grad of jit": lambda f: GRADIENT(loss)(jax.jit(f), XS, WEIGHT),
    "grad of x alone": lambda f: jax.grad(loss, 1)(f, XS, WEIGHT),
    "grad of the weight alone": lambda f: jax.grad(loss, 2)(f, XS, WEIGHT),
    "grad of scale": lambda f: jax.grad(loss, (1, 2, 3))(f, XS, WEIGHT, SCALES),
    "vmap of grad": lambda f: jax.vmap(partial(GRADIENT(loss), f), (0, None))(XS, WEIGHT),
    "vmap of grad of x": lambda f: jax.vmap(partial(jax.grad(loss, 1), f), (0, None))(XS, WEIGHT),
    "vmap of grad of scale": lambda f: jax.vmap(partial(jax.grad(loss, (1, 2)), lambda x, s: f(x, None, s)))(
        XS, SCALES
    ),
    "grad of vmap": lambda f: GRADIENT(loss)(jax.vmap(f, (0, None)), XS, WEIGHT),
    "grad of vmap of parameters": lambda f: GRADIENT(loss)(jax.vmap(f), XS, WEIGHTS),
    "scan": lambda f: lax.scan(lambda h, w: (f(h, w), h.sum()), XS, WEIGHTS),
    "grad of scan": lambda f: GRADIENT(loss)(
        lambda x, w: lax.scan(lambda h, w: (f(h, w), None), x, w)[0], XS, WEIGHTS
    ),
    "checkpoint": lambda f: GRADIENT(loss)(jax.checkpoint(f), XS, WEIGHT),
    "cond": lambda f: lax.cond(XS[0, 0, 0] > 100, lambda: XS, lambda: f(XS, WEIGHT)),
}


def assert_all_close(values, wanted):
    for value, expected in zip(jax.tree.leaves(values), jax.tree.leaves(wanted), strict=True):
        assert value.shape == expected.shape
        assert jnp.abs(value - expected).max() <= 2e-5 * (1.0 + jnp.abs(expected).max())


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_gives_what_it_gives_of_the_formula(name, device):
    transform = TRANSFORMATIONS[name]
    assert_all_close(transform(norm), transform(formula))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("weight_axis", [None, 0])
def test_a_batch_of_group_norms_is_each_of_them(layout, weight_axis, device):
    images, weights, scales = draw(B, 2, 8, 5, 8), draw(B, 8), draw(B, 2, 8)
    weights = weights if weight_axis == 0 else weights[0]

    def call(x, weight, scale):
        return fusednorm.jax.group_norm(x, 4, weight, scale=scale, activation="silu", layout=layout)

    def differentiate(x, weight, scale):
        return jax.grad(lambda *arrays: loss(call, *arrays), (0, 1, 2))(x, weight, scale)

    for function in (call, differentiate):
        batched = jax.vmap(function, (0, weight_axis, 0))(images, weights, scales)
        each = [function(images[i], weights if weight_axis is None else weights[i], scales[i]) for i in range(B)]
        assert_all_close(batched, jax.tree.map(lambda *parts: jnp.stack(parts), *each))


def test_a_batch_of_norms_over_channels_is_each_of_them(device):
    images, weight = draw(B, 2, 8, 5, 7), draw(8)
    call = partial(fusednorm.jax.add_rms_norm, layout="nchw")
    batched = jax.vmap(call, (0, None, None))(images, images[0], weight)
    assert_all_close(batched.y, jnp.stack([call(x, images[0], weight).y for x in images]))


def test_a_batch_of_no_calls_has_no_results(device):
    call = partial(fusednorm.jax.group_norm, num_groups=4)
    images = jnp.ones((0, 2, 8, 5))
    assert jax.vmap(call)(images).shape == images.shape
    assert jax.vmap(jax.grad(lambda x: call(x).sum()))(images).shape == images.shape


def test_each_call_of_a_batch_has_the_mask_that_it_has_alone(device):
    call = partial(fusednorm.jax.layer_norm, dropout=0.5, seed=3)
    assert_all_close(jax.vmap(call)(XS), jnp.stack([call(x) for x in XS]))


SEEDS = {
    "int32": (jnp.int32(-3), -3),
    "uint32": (jnp.uint32((1 << 32) - 3), (1 << 32) - 3),
    "int8": (jnp.int8(-3), -3),
    "numpy": (np.array(-(1 << 40)), -(1 << 40)),
    "a number of numpy": (np.int64(-(1 << 40)), -(1 << 40)),
    "an unsigned number of numpy": (np.uint64((1 << 64) - 3), -3),
}


@pytest.mark.parametrize("name", SEEDS)
def test_an_array_is_the_seed_that_its_value_is(name, device):
    seed, number = SEEDS[name]
    wanted = fusednorm.jax.rms_norm(XS, dropout=0.5, seed=number)
    assert (fusednorm.jax.rms_norm(XS, dropout=0.5, seed=seed) == wanted).all()
    assert (fusednorm.jax.rms_norm(XS, dropout=0.5, seed=number + 1) != wanted).any()


@pytest.mark.parametrize("number", [-(1 << 40), (1 << 63) - 1])
def test_an_array_of_64_bits_is_a_seed_with_both_words(number, device):
    with jax.enable_x64(True):
        y = jax.jit(lambda seed: fusednorm.jax.rms_norm(XS, dropout=0.5, seed=seed))(jnp.int64(number))
        assert_all_close(y, fusednorm.jax.rms_norm(XS, dropout=0.5, seed=number))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
def test_a_call_moves_nothing_to_the_device_for_a_seed_that_is_there(dtype, device):
    x, seed = draw(3, COLS), jnp.asarray(3, dtype)
    with jax.transfer_guard("disallow"):
        fusednorm.jax.layer_norm(x, dropout=0.5, seed=seed)


def test_one_compiled_program_takes_every_seed(device):
    @jax.jit
    def differentiate(x, seed):
        return jax.value_and_grad(loss, 1)(partial(fusednorm.jax.layer_norm, dropout=0.5, seed=seed), x)

    def draw_seed(step):
        return jax.random.bits(jax.random.fold_in(jax.random.key(0), step))

    steps = [differentiate(XS, draw_seed(step)) for step in range(3)]
    assert differentiate._cache_size() == 1
    for step, results in enumerate(steps):
        norm = partial(fusednorm.jax.layer_norm, dropout=0.5, seed=int(draw_seed(step)))
        assert_all_close(results, jax.value_and_grad(loss, 1)(norm, XS))
    assert len({float(value) for value, _ in steps}) == 3


def test_numbers_as_seeds_compile_a_call_once(device):
    x = draw(3, 5)
    fusednorm.jax.layer_norm(x, dropout=0.25, seed=0)
    compiled = calls._compute_norm._cache_size()
    for seed in range(1, 4):
        fusednorm.jax.layer_norm(x, dropout=0.25, seed=seed)
    assert calls._compute_norm._cache_size() == compiled


def test_each_call_of_a_batch_has_a_seed_of_its_own(device):
    call = partial(fusednorm.jax.layer_norm, dropout=0.5)
    batched = jax.vmap(lambda x, seed: call(x, seed=seed))(XS, jnp.arange(B))
    assert_all_close(batched, jnp.stack([call(x, seed=seed) for seed, x in enumerate(XS)]))


def test_each_step_of_a_scan_has_a_seed_of_its_own(device):
    def step(h, seed):
        y = fusednorm.jax.layer_norm(h, dropout=0.5, seed=seed)
        return y, y

    _, scanned = lax.scan(jax.checkpoint(step), XS, jnp.arange(3))
    h = XS
    for seed, y in enumerate(scanned):
        h, _ = step(h, seed)
        assert_all_close(y, h)


def test_each_shard_may_have_a_seed_of_its_own():
    if len(jax.devices()) < 2:
        pytest.skip("there is one device")
    rows = PartitionSpec("rows")

    @partial(jax.shard_map, mesh=Mesh(jax.devices()[:2], ("rows",)), in_specs=rows, out_specs=rows)
    def call(x):
        return fusednorm.jax.layer_norm(x, dropout=0.5, seed=lax.axis_index("rows"))

    x = draw(8, COLS)
    parts = [fusednorm.jax.layer_norm(part, dropout=0.5, seed=seed) for seed, part in enumerate((x[:4], x[4:]))]
    assert_all_close(jax.jit(call)(x), jnp.concatenate(parts))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_shards_are_added_up(check_vma):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("there is one device")
    mesh = Mesh(devices[:2], ("rows",))
    rows, whole = PartitionSpec("rows"), PartitionSpec()
    x = draw(8, COLS)

    @partial(jax.shard_map, mesh=mesh, in_specs=(rows, whole), out_specs=(whole, rows, whole), check_vma=check_vma)
    def step(x, weight):
        total, differentiate = jax.vjp(partial(loss, norm), x, weight)
        dx, dweight = differentiate(lax.pcast(jnp.ones(()), "rows", to="varying") if check_vma else jnp.ones(()))
        # Where JAX tracks what varies, it has added up the gradient of what does not.
        return lax.psum(total, "rows"), dx, dweight if check_vma else lax.psum(dweight, "rows")

    total, dx, dweight = jax.jit(step)(x, WEIGHT)
    wanted, gradients = jax.value_and_grad(partial(loss, formula), (0, 1))(x, WEIGHT)
    assert_all_close((total, dx, dweight), (wanted, *gradients))


def test_grad_of_a_sharded_function(device):
    if device == "gpu" and len(jax.devices("gpu")) < 2:
        pytest.skip("there is one GPU")
    mesh = Mesh(jax.devices(device)[:2], ("rows",))
    sharded = jax.shard_map(
        norm, mesh=mesh, in_specs=(PartitionSpec("rows"), PartitionSpec()), out_specs=PartitionSpec("rows")
    )
    x = draw(8, COLS)
    assert_all_close(GRADIENT(loss)(sharded, x, WEIGHT), GRADIENT(loss)(formula, x, WEIGHT))


def test_explicit_sharding_is_that_of_x_and_of_each_array():
    if len(jax.devices()) < 2:
        pytest.skip("there is one device")
    with jax.set_mesh(jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])):
        x, scale = (jax.device_put(array, PartitionSpec("rows")) for array in (draw(8, 3, COLS), draw(8, COLS)))
        weight = jax.device_put(WEIGHT, PartitionSpec())
        assert jax.typeof(jax.jit(norm)(x, weight, scale)) == jax.typeof(x)
        gradients = jax.jit(partial(jax.grad(loss, (1, 2, 3)), norm))(x, weight, scale)
        assert [jax.typeof(each) for each in gradients] == [jax.typeof(each) for each in (x, weight, scale)]
        gathered = (jax.sharding.reshard(each, PartitionSpec()) for each in (x, weight, scale))
        assert_all_close(gradients, jax.grad(loss, (1, 2, 3))(formula, *gathered))


SHARDED_BATCHES = {
    "rows": lambda f: jax.vmap(lambda x: f.layer_norm(x, WEIGHT)),
    "samples": lambda f: jax.vmap(lambda x: f.group_norm(x, 4, WEIGHT)),
    "masks": lambda f: jax.vmap(lambda x: f.layer_norm(x, dropout=0.5, seed=3)),
    "gradients": lambda f: jax.vmap(jax.grad(lambda x: (f.layer_norm(x, WEIGHT) ** 2).sum())),
}


@pytest.mark.parametrize("name", SHARDED_BATCHES)
def test_a_batch_that_is_sharded_over_an_explicit_axis_stays_so(name):
    if len(jax.devices()) < 2:
        pytest.skip("there is one device")
    call = SHARDED_BATCHES[name](fusednorm.jax)
    x = draw(4, 3, COLS)
    wanted = call(x)
    with jax.set_mesh(jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])):
        sharded = jax.device_put(x, PartitionSpec("rows"))
        for result in (call(sharded), jax.jit(call)(sharded)):
            assert jax.typeof(result) == jax.typeof(sharded)
            assert_all_close(np.asarray(result), wanted)
