"""Results and gradients against float64, on the CPU and on a GPU."""

import fusednorm.jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusednorm.jax.formulas import compute_dropout_mask

from tests.jax.reference_cases import load_reference_cases

CASES = load_reference_cases()
TOLERANCES = {"float32": 2e-5, "bfloat16": 2.0**-7, "float16": 2.0**-9}


def assert_close(value, wanted, dtype):
    """Assert a small error relative to the values of that size, and to one."""
    assert str(value.dtype) == dtype
    error = np.abs(np.asarray(value, np.float64) - wanted)
    assert (error <= TOLERANCES[dtype] * (1.0 + np.abs(wanted))).all(), error.max()


def convert(arrays, dtype):
    return {name: jnp.asarray(array, dtype) for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_float64(name, dtype, device):
    case = CASES[name]

    def call(inputs):
        result = getattr(fusednorm.jax, case.function)(**inputs, **case.options)
        return result._asdict() if "residual" in inputs else {"y": result}

    results, differentiate = jax.vjp(jax.jit(call), convert(case.inputs, dtype))
    (gradients,) = differentiate(convert(case.cotangents, dtype))
    assert results.keys() == case.results.keys()
    assert gradients.keys() == case.gradients.keys()
    for key, wanted in case.results.items():
        assert_close(results[key], wanted, dtype)
    for key, wanted in case.gradients.items():
        size = np.abs(wanted).max()
        # A sum of many rounded products has the error of its largest.
        assert_close(gradients[key] / gradients[key].dtype.type(size), wanted / size, dtype)


def test_a_mean_far_from_zero_costs_no_precision(device):
    x = np.float32(1e4) + np.random.default_rng(0).standard_normal((4, 3000)).astype(np.float32)
    exact = x.astype(np.float64)
    wanted = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    assert np.abs(np.asarray(fusednorm.jax.layer_norm(x)) - wanted).max() < 1e-5


def test_a_nan_stays_in_its_row(device):
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    clean = np.asarray(fusednorm.jax.layer_norm(x, activation="relu"))
    x[1, 5] = np.nan
    y = np.asarray(fusednorm.jax.layer_norm(x, activation="relu"))
    assert np.isnan(y[1]).all()
    assert (np.delete(y, 1, 0) == np.delete(clean, 1, 0)).all()


def test_dropout_is_the_same_mask_for_the_same_seed():
    seeds = (jnp.array(words, jnp.uint32) for words in ([3, 0], [3, 0], [3, 1]))
    first, again, other = (compute_dropout_mask(seed, 50, 333, 0.25) for seed in seeds)
    assert (first == again).all()
    assert (first != other).any()
    assert abs(float(first.mean()) - 0.75) < 0.02
