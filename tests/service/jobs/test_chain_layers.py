"""Registered layers in a row are one layer, if a chain can have them."""

import pytest
from normserve.errors import InvalidParameterError
from normserve.jobs.chain_layers import make_chain_layer
from normserve.jobs.job import Op
from normserve.memory.tensors import DType

from tests.service.jobs.fake_jobs import job, layer


def test_a_chain_has_what_its_layers_have():
    residents = object(), object()
    layers = [
        layer("a", eps=1e-3, backend_parameters=residents[0]),
        layer("b", eps=1e-3, dtype=DType.FLOAT16, has_bias=False, nbytes=8, backend_parameters=residents[1]),
    ]
    chain = make_chain_layer(layers)
    assert (chain.op, chain.name, chain.size, chain.spec.eps) == (Op.LAYER_NORM_CHAIN, "a,b", 4, 1e-3)
    assert chain.nbytes == layers[0].nbytes + 8
    assert chain.backend_parameters.layer_parameters == residents


def test_kernels_depend_on_the_parameters_of_every_norm():
    plain, half = layer("a"), layer("b", dtype=DType.FLOAT16)
    chains = [make_chain_layer(each) for each in ([plain], [plain, plain], [plain, half], [half, plain])]
    classes = {job(3, 4, layer=chain, op=Op.LAYER_NORM_CHAIN).compute_kernel_class() for chain in chains}
    assert len(classes) == len(chains)
    again = job(7, 4, layer=make_chain_layer([half, plain]), op=Op.LAYER_NORM_CHAIN)
    assert again.compute_kernel_class() in classes


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer("a", op=Op.RMS_NORM)], "layer 'a' is of rms_norm, a chain is of layer_norm"),
        ([layer("a"), layer("b", heads=2)], "layer 'b' has one of heads, weight_offset, activation"),
        ([layer("a", weight_offset=1.0)], "layer 'a' has one of heads, weight_offset, activation"),
        ([layer("a", activation="silu")], "layer 'a' has one of heads, weight_offset, activation"),
        ([layer("a"), layer("b", 8)], "one size and eps: 'a' has 4 and 1e-05, 'b' has 8 and 1e-05"),
        ([layer("a"), layer("b", eps=0.5)], "one size and eps: 'a' has 4 and 1e-05, 'b' has 4 and 0.5"),
        ([layer("a")] * 9, "1 to 8 layers, got 9"),
    ],
)
def test_layers_that_make_no_chain_are_refused_by_name(layers, message):
    with pytest.raises(InvalidParameterError) as caught:
        make_chain_layer(layers)
    assert message in caught.value.detail
