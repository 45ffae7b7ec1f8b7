"""Wrong arguments, and calls that no pass computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusednorm.jax import (
    KernelInputError,
    add_group_norm,
    add_layer_norm,
    add_rms_norm,
    group_norm,
    layer_norm,
    rms_norm,
)

X = jnp.ones((2, 3, 8))
IMAGE = jnp.ones((2, 12, 4, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm(X, jnp.ones(7)), r"x \[2, 3, 8\] needs weight \[8\], got \[7\]"),
        (lambda: layer_norm(X.astype(int)), "x must be float32, float16 or bfloat16, got int32"),
        (lambda: layer_norm(X, eps=-1.0), "eps must be at least 0 and finite, got -1.0"),
        (lambda: layer_norm(X, activation="swish"), "activation must be one of none, relu, "),
        (lambda: layer_norm(X, dropout=0.5), "dropout needs a seed, got None"),
        (lambda: layer_norm(X, weight_offset=1.0), "weight_offset needs a weight, got None"),
        (lambda: layer_norm(X, layout="nhwc"), "layout must be None or \"nchw\", got 'nhwc'"),
        (lambda: rms_norm(X, scale=jnp.ones((3, 8))), "needs scale with the shape of leading axes of x"),
        (lambda: rms_norm(jnp.ones((2, 0))), r"x must be \[..., cols\] with cols >= 1"),
        (lambda: add_layer_norm(X, X[0]), r"residual must have x's shape \[2, 3, 8\], got \[3, 8\]"),
        (lambda: add_layer_norm(X, None), "add_layer_norm needs a residual, got None: without one call layer_norm"),
        (lambda: add_rms_norm(X, None), "add_rms_norm needs a residual, got None: without one call rms_norm"),
        (lambda: add_group_norm(IMAGE, None, 3), "add_group_norm needs a residual, got None"),
        (lambda: group_norm(IMAGE, 5), "num_groups must be at least 1 and divide C = 12, got num_groups = 5"),
        (lambda: group_norm(IMAGE, 3, layout="nhwc"), "divide C = 4, got num_groups = 3"),
        (lambda: group_norm(IMAGE, 3, layout="chwn"), 'layout must be "nchw" or "nhwc", got \'chwn\''),
        (lambda: group_norm(IMAGE, 3, scale=jnp.ones(12)), r"needs scale \[2, 12\], got \[12\]"),
    ],
)
def test_wrong_arguments_are_refused_as_those_of_torch(call, message):
    with pytest.raises(KernelInputError, match=message):
        call()


@pytest.mark.parametrize("given", [[[1.0, 2.0]], 1.0, None])
def test_what_is_no_array_is_refused(given):
    with pytest.raises(TypeError, match=r"x must be an array of JAX or numpy, got .*: write jnp.asarray\(x\)"):
        layer_norm(given)


@pytest.mark.parametrize("shape", [(8,), [8], 8])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_the_form_of_torchs_own_function_is_refused_with_the_argument_that_is_too_many(norm, shape):
    with pytest.raises(TypeError, match=r"^weight must be .*, got .*8.*: there is no normalized_shape before "):
        norm(X, shape, jnp.ones(8))


def test_arrays_of_numpy_are_taken():
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    assert (layer_norm(x, np.ones(8, np.float32)) == layer_norm(jnp.asarray(x), jnp.ones(8))).all()


@pytest.mark.parametrize("name", ["eps", "weight_offset", "dropout", "negative_slope"])
def test_an_option_that_is_traced_or_an_array_is_refused(name):
    with pytest.raises(
        KernelInputError, match=rf"{name} must be a Python value, got a traced int32\[\]: under jax.jit bind it by "
    ):
        jax.jit(lambda x, value: layer_norm(x, X[0, 0], **{name: value}))(X, 1)
    with pytest.raises(KernelInputError, match=rf"{name} must be a Python value, got an array int64\[\]$"):
        layer_norm(X, X[0, 0], **{name: np.array(1)})


def test_the_bias_that_rms_norm_does_not_have_is_named_by_its_shape_alone():
    with pytest.raises(KernelInputError, match=r"^eps must be a Python value, got an array float32\[8\]$"):
        rms_norm(X, jnp.ones(8), jnp.ones(8))


@pytest.mark.parametrize("dtype", [">f4", object, np.longdouble, "U1"])
def test_an_array_of_numpy_whose_dtype_jax_does_not_have_is_refused_by_its_name(dtype):
    array = np.ones(8, dtype)
    with pytest.raises(KernelInputError, match=f"^weight must be float32, .*, got {array.dtype}$"):
        layer_norm(X, array)


def test_ints_that_vjp_passes_on_are_options():
    x = jnp.arange(24.0).reshape(2, 12)
    y, _ = jax.vjp(lambda x, groups, seed: group_norm(x, groups, dropout=0.5, seed=seed), x, 3, 5)
    assert (y == group_norm(x, 3, dropout=0.5, seed=5)).all()


@pytest.mark.parametrize("seed", [jax.random.key(0), jnp.ones(()), jnp.array([3]), np.array([3]), np.array(True)])
def test_an_array_that_is_no_integer_is_no_seed(seed):
    message = (
        r"seed must be an int or an array of integers of shape \(\), got .*: a key of jax.random gives one by "
    )
    with pytest.raises(KernelInputError, match=message):
        layer_norm(X, dropout=0.5, seed=seed)


def test_a_traced_number_of_groups_is_refused():
    with pytest.raises(KernelInputError, match="num_groups must be a Python value"):
        jax.jit(group_norm)(IMAGE, 3)


def test_calls_without_rows_return_nothing_and_have_gradients_of_zero():
    x, weight = jnp.ones((0, 8), jnp.bfloat16), jnp.ones(8)
    y, residual_out = add_layer_norm(x, jnp.ones((0, 8)), weight)
    assert (y.shape, y.dtype, residual_out.dtype) == ((0, 8), jnp.bfloat16, jnp.float32)
    assert (jax.grad(lambda weight: layer_norm(x, weight).sum())(weight) == 0).all()
    _, sums = add_group_norm(jnp.ones((0, 4, 4, 12), jnp.bfloat16), jnp.ones((0, 4, 4, 12)), 3, layout="nhwc")
    assert sums.dtype == jnp.bfloat16


def test_forward_mode_is_refused_with_a_reason():
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(layer_norm, (X,), (X,))


def test_a_second_derivative_is_refused_with_a_reason():
    def loss(x):
        return (layer_norm(x) ** 2).sum()

    for differentiate in (jax.hessian(loss), jax.grad(lambda x: jax.grad(loss)(x).sum())):
        with pytest.raises(TypeError, match="are differentiated once, in reverse mode"):
            differentiate(X)
