"""Query parameters that mean nothing are refused, by name."""

import numpy as np
import pytest

from tests.integration.harness.wire import X, assert_problem, npy, post


@pytest.mark.parametrize(
    ("path", "name", "closest"),
    [
        ("/v1/layer_norm", "epsilon", "eps"),
        ("/v1/layer_norm", "activaton", "activation"),
        ("/v1/rms_norm", "Eps", "eps"),
        ("/v1/layer_norm/backward", "dtype", None),
        ("/v1/layer_norm", "num_groups", None),
        ("/v1/layer_norm", "", None),
        ("/v1/layer_norm", "zzz" * 100, None),
    ],
)
def test_unknown_names_are_refused_with_what_may_have_been_meant(api, path, name, closest):
    response = post(api, path, params={name: "1"})
    assert_problem(response, 422, "invalid_parameter")
    detail = response.json()["detail"]
    assert (f"the closest is {closest!r}" if closest else "expected eps, ") in detail


@pytest.mark.parametrize(
    "query",
    [
        *(
            "eps=0",
            "eps=-1e-5",
            "eps=nan",
            "eps=inf",
            "eps=1e400",
            "eps=x",
            "eps=",
            "eps=1_0",
            "eps=1e-60",
        ),
        *("eps=+-1", "eps=0x1p-3", "eps=%201", "eps=1e-5&eps=1e-5", "eps", "eps=%ff", "eps=%D9%A1"),
        *("activation=tanh", "activation=", "activation=RELU"),
        *("dropout=1", "dropout=-0.1", "dropout=nan", "dropout=0.5", "dropout=0.5&seed=x"),
        *("dropout=0.5&seed=9223372036854775808", "dropout=0.5&seed=1.5"),
        *("out_dtype=float64", "out_dtype=f4", "stats=maybe", "stats="),
        *("timeout_ms=0", "timeout_ms=-1", "timeout_ms=inf", "timeout_ms=x"),
        *("layer=", "layer=a%20b", "layer=" + "x" * 129),
        "&".join(f"p{index}=1" for index in range(200)),
    ],
)
def test_values_that_mean_nothing_are_refused(api, query):
    assert_problem(api.post(f"/v1/layer_norm?{query}", content=npy(X)), 422, "invalid_parameter")


@pytest.mark.parametrize(
    "query", ["", "num_groups=0", "num_groups=-2", "num_groups=5", "num_groups=2.0", "num_groups=x"]
)
def test_groups_must_come_out_even(api, query):
    response = api.post(f"/v1/group_norm?{query}", content=npy(np.ones((2, 12, 3), np.float32)))
    assert_problem(response, 422, "invalid_parameter")


def test_layout_is_one_of_two(api):
    response = post(api, "/v1/group_norm", params={"num_groups": 2, "layout": "chwn"})
    assert_problem(response, 422, "invalid_parameter")
