"""Registered layers: their names, and a budget of bytes."""

import gc
import weakref

import pytest
from normserve.errors import NotReadyError, TooLargeError, UnknownLayerError
from normserve.jobs.job import Op
from normserve.layers.registry import LayerRegistry

from tests.service.jobs.fake_jobs import layer


@pytest.fixture
def layers():
    return LayerRegistry(max_layers=3, max_bytes=100)


def test_bytes_are_bounded_to_the_last(layers):
    layers.put_or_replace(layer("a", nbytes=60))
    with pytest.raises(TooLargeError, match=r"take 41 bytes beside 60 .* no more than 100"):
        layers.put_or_replace(layer("b", nbytes=41))
    assert "b" not in layers
    layers.put_or_replace(layer("b", nbytes=40))
    assert layers.nbytes == 100


def test_a_replaced_layer_counts_by_the_difference(layers):
    layers.put_or_replace(layer("a", nbytes=60))
    layers.put_or_replace(layer("b", nbytes=30))
    assert layers.put_or_replace(layer("a", nbytes=70))
    assert layers.nbytes == 100
    with pytest.raises(TooLargeError):
        layers.put_or_replace(layer("a", nbytes=71))
    assert (layers.nbytes, layers.get("a").nbytes) == (100, 70)
    assert layers.put_or_replace(layer("a", nbytes=1))
    assert layers.nbytes == 31


def test_removed_bytes_come_back(layers):
    layers.put_or_replace(layer("a", nbytes=100))
    layers.remove("a")
    assert layers.nbytes == 0
    with pytest.raises(UnknownLayerError):
        layers.remove("a")
    layers.put_or_replace(layer("b", nbytes=100))


def test_layers_that_are_being_brought_count_already(layers):
    layers.put_or_replace(layer("a", nbytes=20))
    with layers.reserve("b", 50):
        with pytest.raises(TooLargeError, match="take 31 bytes beside 70"), layers.reserve("c", 31):
            pass
        with layers.reserve("a", 50):
            layers.put_or_replace(layer("a", nbytes=50))
        layers.put_or_replace(layer("b", nbytes=50))
    assert layers.nbytes == 100
    layers.put_or_replace(layer("a", nbytes=50))


def test_what_does_not_come_keeps_no_room(layers):
    with pytest.raises(ValueError, match="the device"), layers.reserve("a", 100):
        raise ValueError("the device has not")
    layers.put_or_replace(layer("b", nbytes=100))


def test_names_are_bounded_too(layers):
    for name in "abc":
        layers.put_or_replace(layer(name, nbytes=1))
    with pytest.raises(TooLargeError, match="3 layers"):
        layers.put_or_replace(layer("d", nbytes=1))
    with pytest.raises(TooLargeError, match="3 layers"), layers.reserve("d", 1):
        pass
    assert layers.put_or_replace(layer("c", nbytes=2))


class Resident:
    """What a backend keeps of a layer."""


def test_the_same_layers_are_the_same_chain_until_one_of_them_changes(layers):
    layers.put_or_replace(layer("a"))
    layers.put_or_replace(layer("b"))
    chain = layers.resolve(Op.LAYER_NORM_CHAIN, "b,a,b")
    assert chain.name == "b,a,b"
    assert layers.resolve(Op.LAYER_NORM_CHAIN, "b,a,b") is chain
    layers.put_or_replace(layer("a", eps=0.5))
    layers.put_or_replace(layer("b", eps=0.5))
    assert layers.resolve(Op.LAYER_NORM_CHAIN, "b,a,b").spec.eps == 0.5
    layers.remove("a")
    with pytest.raises(UnknownLayerError):
        layers.resolve(Op.LAYER_NORM_CHAIN, "b,a,b")
    assert layers.resolve(Op.LAYER_NORM, "b") is layers.get("b")


def test_a_removed_layer_is_not_kept_by_a_chain(layers):
    resident = Resident()
    freed = weakref.ref(resident)
    layers.put_or_replace(layer("a", backend_parameters=resident))
    layers.resolve(Op.LAYER_NORM_CHAIN, "a,a")
    del resident
    layers.remove("a")
    gc.collect()
    assert freed() is None


def test_only_so_many_chains_are_kept(layers, monkeypatch):
    monkeypatch.setattr("normserve.layers.registry._MOST_CHAINS", 2)
    layers.put_or_replace(layer("a"))
    for count in range(1, 8):
        assert layers.resolve(Op.LAYER_NORM_CHAIN, ",".join(["a"] * count)).nbytes == count * layer().nbytes
        assert len(layers._chain_cache) <= 2


def test_what_may_still_come_is_not_unknown(layers):
    layers.is_loading = True
    layers.put_or_replace(layer("a"))
    assert layers.get("a").name == "a"
    for op, name in ((Op.LAYER_NORM, "b"), (Op.LAYER_NORM_CHAIN, "a,b")):
        with pytest.raises(NotReadyError, match="still loading its layers"):
            layers.resolve(op, name)
    layers.is_loading = False
    with pytest.raises(UnknownLayerError):
        layers.get("b")
