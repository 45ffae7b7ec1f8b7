"""What an unknown name probably means."""

import pytest
from normserve.errors.name_suggestions import find_closest_tensor_name, suggest_name

NAMES = ("x", "weight", "bias", "scale", "dy")


def test_of_names_that_are_like_nothing_all_are_listed():
    assert suggest_name("activations", ("activation", "eps")) == "the closest is 'activation'"
    assert suggest_name("momentum", ("activation", "eps")) == "expected activation, eps"


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("weights", "weight"),
        ("X", "x"),
        ("x.0", "x"),
        ("input", "x"),
        ("INPUT__0", "x"),
        ("hidden_states", "x"),
        ("bert.encoder.LayerNorm.gamma", "weight"),
        ("model.layers.0.input_layernorm.weight", "weight"),
        ("beta", "bias"),
        ("grad_output", "dy"),
        ("scale_1", "scale"),
        ("noise", ""),
        ("", ""),
        ("w" * 10_000, ""),
    ],
)
def test_a_tensor_is_found_by_similarity_and_by_its_usual_names(sent, meant):
    assert find_closest_tensor_name(sent, NAMES) == meant


def test_of_equally_similar_names_the_first_is_meant():
    assert find_closest_tensor_name("weight", ("x", "weight.0", "bias.0", "weight.1", "bias.1")) == "weight.0"


def test_where_there_is_no_scale_it_is_the_weight():
    assert find_closest_tensor_name("scale", ("weight", "bias")) == "weight"
