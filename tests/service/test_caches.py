"""Whatever clients and callers send, what is remembered of it has a bound."""

import functools
import importlib
import itertools
import os
import pkgutil
import sys
from types import SimpleNamespace

import fusednorm
import normserve
import numpy as np
import pytest
from normserve.client.calls import operations
from normserve.client.http.direct_transport import RequestEncoder
from normserve.client.http.server_address import ServerAddress
from normserve.client.local.allocator import HostArena
from normserve.client.local.array_memory import NumpyArrayMemory
from normserve.client.local.call_cache import CallCache
from normserve.client.results import ForwardResult, Timing
from normserve.http.middleware.origin_policy import OriginPolicy
from normserve.http.oip.inference_statistics import InferenceStatistics
from normserve.jobs.job import Op
from normserve.layers.registry import LayerRegistry
from normserve.memory.host_segments import HostSegment, make_segment

from tests.service.client.local.fake_link import FakeLink
from tests.service.growth import assert_bounded
from tests.service.jobs.fake_jobs import layer

UNBOUNDED = {
    "normserve.codec.json_tensors._make_nested_decoder": "one for each rank, which is bounded",
    "normserve.client.calls.array_conversion.get_numpy_dtype": "one for each dtype",
    "normserve.client.local.call_cache._get_parameter_name": "one for each argument of each operation",
    "normserve.jobs.job.list_options": "one for each pass of each operation",
    "normserve.memory.device_segments._import_driver": "one",
    "normserve.requests.request_parameters.list_operation_parameters": "one for each pass of each operation",
    "fusednorm.api.operator_definitions.define_operators": "one",
    "fusednorm.arguments.inputs.group_names_by_role": "one for each pass of each operation",
    "fusednorm.arguments.options._select_fields": "one for each operation",
    "fusednorm.launch.memories._kept": "one for each stream",
    "fusednorm.tensors.devices.copy_bandwidth": "one for each device",
    "fusednorm.tensors.devices.describe_device": "one for each device",
    "fusednorm.warm.absent_driver._has_driver": "one",
    "fusednorm.warm.compile_records._describe_versions": "one",
}
"""Functions with a cache without a bound, and why it needs none."""


def modules(*packages):
    for package in packages:
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            # These run programs.
            if found.name.endswith("__main__"):
                continue
            try:
                yield importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                # Of an extra, such as Ray, that is not installed.
                if error.name is None or error.name.startswith(package.__name__):
                    raise


def test_functions_remember_so_many_calls():
    unbounded = set()
    for module in modules(normserve, fusednorm):
        for holder in (module, *(each for each in vars(module).values() if isinstance(each, type))):
            found = [each for each in vars(holder).values() if isinstance(each, functools._lru_cache_wrapper)]
            names = {f"{each.__module__}.{each.__qualname__}": each.cache_parameters()["maxsize"] for each in found}
            unbounded |= {name for name, most in names.items() if most is None and name.startswith(module.__name__)}
    assert unbounded == UNBOUNDED.keys()


def test_spellings_of_hosts():
    origins = OriginPolicy(["localhost"])
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": "/", "client": ("127.0.0.1", 1)}
    assert_bounded(lambda number: origins.check_request(scope, {b"host": b"localhost:%d" % (number + 1)}), 1024)


def test_chains_of_layers():
    layers = LayerRegistry(max_layers=4, max_bytes=1000)
    for name in "abcd":
        layers.put_or_replace(layer(name))
    named = [",".join(each) for each in itertools.product("abcd", repeat=5)]
    assert_bounded(lambda number: layers.resolve(Op.LAYER_NORM_CHAIN, named[number]), 256)


def test_names_of_models():
    statistics = InferenceStatistics(lambda: ["layer_norm"])
    assert_bounded(lambda number: statistics.count_failure(f"model {number}", 0.1), 1024)


def test_heads_of_a_clients_requests():
    requests = RequestEncoder(ServerAddress("localhost", 80), None)

    def ask(number):
        requests.encode(SimpleNamespace(method="POST", target=f"/v1/layer_norm?eps={number}", encode_body=list))

    assert_bounded(ask, 256)


@pytest.fixture
def arena():
    descriptor, segment = make_segment(2**20, HostSegment)
    os.close(descriptor)
    arena = HostArena()
    arena.add_segment(5, segment)
    return arena


def test_calls_of_a_client_that_shares_memory(arena):
    recurring = CallCache(NumpyArrayMemory(arena))
    x, y = np.zeros((2, 4, 256), np.float32)

    def learn(number):
        named = {"eps": 1.0 + number}
        signature = recurring.compute_signature(operations.layer_norm, (x,), named)
        recurring.try_add_call(
            signature, operations.layer_norm(x, **named), ForwardResult(y, None, None, None, Timing())
        )

    assert_bounded(learn, 1024)


def test_places_of_results_that_were_there_at_the_same_time(arena):
    recurring, link = CallCache(NumpyArrayMemory(arena)), FakeLink()
    x, y = np.zeros((2, 4, 256), np.float32)
    signature = recurring.compute_signature(operations.layer_norm, (x,), {})
    recurring.try_add_call(signature, operations.layer_norm(x), ForwardResult(y, None, None, None, Timing()))

    def ask(count):
        asked = [link.request(recurring, signature) for _ in range(count)]
        assert all(result is not None for result in asked)
        link.asked.clear()

    ask(4)
    before = sys.getallocatedblocks()
    ask(100)
    # The arena has parts now; of a place, what was sent for it would be three times as much.
    assert sys.getallocatedblocks() < before + 8 * 100
