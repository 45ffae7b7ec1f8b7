"""CUDA shared memory over gRPC, which another process than the server has allocated; needs a GPU."""

import base64
import queue

import numpy as np
import pytest
import torch
from normserve.memory.device_segments import ShareableDevice

from tests.integration.clients.device.serving import metric
from tests.integration.oip.device import regions
from tests.integration.oip.device.documented_example import ROWS, check_example, normalised
from tests.service.memory.allocations import allocation_of

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("tritonclient.grpc")

MIB = 2**20

#: By operation: x's shape, the channels, the inputs beside x, and the parameters.
OPERATIONS = {
    "layer_norm": ((37, 1024), 1024, ("weight", "bias"), {"eps": 1e-3}),
    "rms_norm": ((37, 1024), 1024, ("weight",), {}),
    "group_norm": ((2, 32, 16, 16), 32, ("weight", "bias"), {"num_groups": 8}),
}


@pytest.fixture
def memory():
    """An allocation of its own: more than torch's allocator divides."""
    return torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")


@pytest.fixture
def cuda():
    pytest.importorskip("cuda.bindings.runtime")
    return pytest.importorskip("tritonclient.utils.cuda_shared_memory")


class RegisteredAllocation:
    """An allocation that is registered over gRPC, and tensors side by side in it."""

    def __init__(self, client, memory, name="r"):
        found = allocation_of(ShareableDevice(torch.cuda.current_device()), memory.data_ptr())
        handle = base64.b64encode(found.handle)
        client.register_cuda_shared_memory(name, handle, 0, found.nbytes)
        self.region = regions.Region(name, found.address, found.nbytes, found.handle)
        self._memory, self._end = memory, 0

    def make(self, dtype, *shape):
        """A tensor at the next multiple of 256 bytes."""
        begin, nbytes = self._end, torch.Size(shape).numel() * dtype.itemsize
        self._end += -(-nbytes // 256) * 256
        return self._memory[begin : begin + nbytes].view(dtype).view(shape)

    def describe_inputs(self, tensors):
        return [
            self._place(triton.InferInput(name, [*tensor.shape], regions.DATATYPES[tensor.dtype]), tensor)
            for name, tensor in tensors.items()
        ]

    def describe_outputs(self, tensors):
        return [self._place(triton.InferRequestedOutput(name), tensor) for name, tensor in tensors.items()]

    def _place(self, described, tensor):
        offset = tensor.data_ptr() - self.region.address
        described.set_shared_memory(self.region.name, tensor.nbytes, offset=offset)
        return described


@pytest.fixture
def shared(client, memory):
    return RegisteredAllocation(client, memory)


def infer(client, shared, model, inputs, outputs, **parameters):
    """A call whose tensors all lie in one region; what is on this process's stream is over before."""
    torch.cuda.synchronize()
    given, wanted = shared.describe_inputs(inputs), shared.describe_outputs(outputs)
    return client.infer(model, given, outputs=wanted, parameters=parameters)


@pytest.mark.parametrize("dtype", regions.DATATYPES, ids=regions.DATATYPES.values())
@pytest.mark.parametrize("op", OPERATIONS)
def test_results_are_those_of_http_to_the_bit(serving, client, http, shared, op, dtype):
    shape, channels, names, parameters = OPERATIONS[op]
    x, dy = shared.make(dtype, *shape).normal_(), shared.make(dtype, *shape).normal_()
    given = {"x": x} | {name: shared.make(dtype, channels).normal_() for name in names}
    # Two places for each result: of gRPC, and of HTTP.
    ys = [{"y": shared.make(dtype, *shape)} for _ in range(2)]
    gradients = [{f"d{name}": shared.make(dtype, *each.shape) for name, each in given.items()} for _ in range(2)]
    calls = ((op, given, ys), (f"{op}_backward", given | {"dy": dy}, gradients))
    for model, inputs, (of_grpc, of_http) in calls:
        before = metric(serving, "requests_total", 'transport="oip_cuda"')
        result = infer(client, shared, model, inputs, of_grpc, **parameters)
        assert metric(serving, "requests_total", 'transport="oip_cuda"') == before + 1
        assert [each.name for each in result.get_response().outputs] == [*of_grpc]
        assert not result.get_response().raw_output_contents[0]
        response = regions.infer(http, model, shared.region, inputs, of_http, **parameters)
        assert response.status_code == 200, response.text
        for name, tensor in of_grpc.items():
            assert torch.equal(tensor, of_http[name]), name
            assert tensor.isfinite().all(), name
            assert tensor.any(), name


def test_y_over_x(client, shared):
    x = shared.make(torch.float32, 4096, 1024)
    for _ in range(3):
        x.normal_()
        expected = torch.nn.functional.layer_norm(x, (1024,))
        infer(client, shared, "layer_norm", {"x": x}, {"y": x})
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def test_a_stream(client, shared):
    x = shared.make(torch.float32, 64, 1024).normal_()
    ys = [shared.make(torch.float32, 64, 1024) for _ in range(3)]
    torch.cuda.synchronize()
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        for y in ys:
            outputs = shared.describe_outputs({"y": y})
            client.async_stream_infer("layer_norm", shared.describe_inputs({"x": x}), outputs=outputs)
        assert [answers.get(timeout=60)[1] for _ in ys] == [None] * 3
    finally:
        client.stop_stream()
    expected = torch.nn.functional.layer_norm(x, (1024,))
    for y in ys:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_what_http_refuses_is_refused(client, shared):
    x, y = (shared.make(torch.float32, 4, 256) for _ in range(2))
    region = shared.region
    handle = base64.b64encode(region.handle)
    refused = [
        lambda: client.register_cuda_shared_memory("other", handle, 0, region.nbytes + 1),
        lambda: client.register_cuda_shared_memory("other", base64.b64encode(bytes(64)), 0, MIB),
        lambda: client.register_cuda_shared_memory("other", base64.b64encode(bytes(8)), 0, MIB),
        lambda: client.register_cuda_shared_memory(region.name, handle, 0, region.nbytes),
        # The result would be a raw tensor of the response.
        lambda: client.infer("layer_norm", shared.describe_inputs({"x": x})),
        lambda: infer(client, shared, "layer_norm", {"x": x}, {"y": shared.make(torch.float32, 4, 128)}),
    ]
    for call in refused:
        with pytest.raises(triton.InferenceServerException, match="INVALID_ARGUMENT"):
            call()
    assert list(client.get_cuda_shared_memory_status().regions) == [region.name]
    infer(client, shared, "layer_norm", {"x": x}, {"y": y})


def test_from_region_to_region(client, cuda):
    handles = [cuda.create_shared_memory_region(name, ROWS.nbytes, 0) for name in ("x", "y")]
    try:
        for name, handle in zip(("x", "y"), handles, strict=True):
            client.register_cuda_shared_memory(name, cuda.get_raw_handle(handle), 0, ROWS.nbytes)
        listed = client.get_cuda_shared_memory_status().regions
        assert {name: (each.device_id, each.byte_size) for name, each in listed.items()} == {
            "x": (0, ROWS.nbytes),
            "y": (0, ROWS.nbytes),
        }
        assert "cuda_shared_memory" in client.get_server_metadata().extensions
        x = triton.InferInput("x", [*ROWS.shape], "FP32")
        x.set_shared_memory("x", ROWS.nbytes)
        y = triton.InferRequestedOutput("y")
        y.set_shared_memory("y", ROWS.nbytes)
        for factor in (1, -3, 100):
            cuda.set_shared_memory_region(handles[0], [factor * ROWS])
            result = client.infer("layer_norm", [x], outputs=[y])
            assert result.get_output("y").shape == [64, 1024]
            got = cuda.get_contents_as_numpy(handles[1], np.float32, ROWS.shape)
            np.testing.assert_allclose(got, normalised(factor * ROWS), atol=1e-5)
    finally:
        client.unregister_cuda_shared_memory()
        for handle in handles:
            cuda.destroy_shared_memory_region(handle)


def test_the_example_of_the_documentation_runs(client, cuda):
    check_example(triton, client, cuda)
