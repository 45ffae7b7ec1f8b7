"""What came in comes out: numpy arrays and torch tensors, of any layout in memory."""

import subprocess
import sys

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from normserve.client import UnexpectedAnswerError
from normserve.client.calls import array_conversion
from normserve.client.calls.array_conversion import convert_tensor, describe_array
from normserve.memory.tensors import DType, HostTensor

from tests.service.client.harness.fake_server import FakeServer, tensors_answer
from tests.service.client.harness.plain_numpy import plain_numpy as plain_numpy

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def round_trip(value):
    return convert_tensor(describe_array("x", value), value)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[::-1, :, ::2],
        lambda x: x[:0],
        lambda x: x[0, 0, 0],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.asarray(x, x.dtype.newbyteorder(">")),
    ],
    ids=["whole", "transposed", "strided", "empty", "scalar", "broadcast", "big-endian"],
)
def test_a_numpy_array_survives(dtype, view):
    value = np.asarray(view(X.astype(dtype)))
    result = round_trip(value)
    assert result.dtype == dtype
    assert result.shape == value.shape
    np.testing.assert_array_equal(result, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:0], lambda x: x[0, 0, 0], torch._neg_view],
    ids=["whole", "transposed", "strided", "empty", "scalar", "lazily negated"],
)
def test_a_torch_tensor_survives(dtype, view):
    value = view(torch.from_numpy(X).to(dtype)).requires_grad_()
    result = round_trip(value)
    assert result.dtype == dtype
    assert torch.equal(result, value)
    assert not result.requires_grad


def test_contiguous_memory_is_not_copied():
    x = X.copy()
    tensor = describe_array("x", x)
    x[0, 0, 0] = 7
    assert convert_tensor(tensor, x)[0, 0, 0] == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2), r"float32, float16, bfloat16, got float64; x\.astype\(np\.float32\) converts it"),
        (np.zeros(2, np.int32), "got int32"),
        (torch.zeros(2, dtype=torch.float64), "got float64"),
    ],
)
def test_what_the_api_cannot_carry_is_refused_before_sending(connect, value, message):
    server = FakeServer()
    with pytest.raises(TypeError, match=message):
        connect(server).layer_norm(value)
    assert not server.requests


def test_numpy_cannot_hold_float8(connect, plain_numpy):
    server = FakeServer()
    with pytest.raises(TypeError, match="numpy has no float8_e4m3fn"):
        connect(server).layer_norm(X, out_dtype="float8_e4m3fn")
    assert not server.requests


def test_numpy_cannot_hold_bfloat16(connect, plain_numpy):
    server = FakeServer()
    with pytest.raises(TypeError, match="numpy has no bfloat16"):
        connect(server).layer_norm(X, out_dtype="bfloat16")
    assert not server.requests
    with pytest.raises(TypeError, match="numpy has no bfloat16"):
        convert_tensor(HostTensor(DType.BFLOAT16, (1,), memoryview(bytes(2))), X)


def test_numpy_can_hold_it_where_ml_dtypes_is_imported(connect):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = X.astype(ml_dtypes.bfloat16)
    body = safetensors.torch.save({"y": torch.from_numpy(X).bfloat16() + 1})
    server = FakeServer(httpx.Response(200, headers={"content-type": "application/x-safetensors"}, content=body))
    y = connect(server).layer_norm(x).y
    sent = safetensors.torch.load(server.request.content)["x"]
    np.testing.assert_array_equal(sent.view(torch.uint16).numpy(), x.view(np.uint16))
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), (torch.from_numpy(X).bfloat16() + 1).float().numpy())


def test_torch_in_torch_out(connect):
    x = torch.randn(2, 3).bfloat16()
    body = safetensors.torch.save({"y": x + 1, "rstd": torch.ones(2)})
    server = FakeServer(httpx.Response(200, headers={"content-type": "application/x-safetensors"}, content=body))
    result = connect(server).rms_norm(x, stats=True)
    assert torch.equal(safetensors.torch.load(server.request.content)["x"], x)
    assert torch.equal(result.y, x + 1)
    assert torch.equal(result.rstd, torch.ones(2))


def test_raw_memory_passes_as_it_is(connect):
    raw = HostTensor(DType.BFLOAT16, (2,), memoryview(bytes(4)))
    assert describe_array("x", raw) is raw
    y = connect(FakeServer(tensors_answer(y=X[0, 0, :2]))).layer_norm(raw, out_dtype="float32").y
    assert (y.dtype, y.shape, bytes(y.data)) == (DType.FLOAT32, (2,), X[0, 0, :2].tobytes())


def test_a_gradient_is_of_the_kind_of_what_it_belongs_to(connect):
    server = FakeServer(tensors_answer(dx=X, dweight=np.ones(4, np.float32), dbias=np.ones(4, np.float32)))
    result = connect(server).layer_norm_backward(X, X, torch.ones(4), np.ones(4, np.float32))
    assert isinstance(result.dx, np.ndarray)
    assert isinstance(result.dweight, torch.Tensor)
    assert isinstance(result.dbias, np.ndarray)


def test_a_registered_layers_gradient_is_of_the_kind_of_x(connect, plain_numpy):
    server = FakeServer(tensors_answer(dx=X, dweight=np.ones(4, np.float16)))
    assert isinstance(connect(server).layer_norm_backward(X, X, layer="ln").dweight, np.ndarray)
    result = connect(server).layer_norm_backward(X, torch.from_numpy(X), layer="ln")
    assert result.dweight.dtype == torch.float16
    body = safetensors.torch.save({"dx": torch.from_numpy(X), "dweight": torch.ones(4).bfloat16()})
    headers = {"content-type": "application/x-safetensors"}
    with pytest.raises(UnexpectedAnswerError, match="numpy has no bfloat16"):
        connect(FakeServer(httpx.Response(200, headers=headers, content=body))).layer_norm_backward(
            X, X, layer="ln"
        )


def test_elements_at_odd_addresses_are_moved():
    data = memoryview(bytearray(X.tobytes() + b"0"))
    for start in (0, 1):
        data[start : start + X.nbytes] = memoryview(X.tobytes())
        result = convert_tensor(HostTensor(DType.FLOAT32, X.shape, data[start : start + X.nbytes]), torch.empty(0))
        assert torch.equal(result, torch.from_numpy(X))
        assert result.data_ptr() % 4 == 0


def test_neither_torch_nor_the_server_is_imported():
    program = (
        "import sys, numpy, httpx, normserve.client as c\n"
        "server = httpx.MockTransport(lambda request: httpx.Response(429))\n"
        "with c.Client(transport=server, retries=c.RetryPolicy(tries=1)) as client:\n"
        "    try: client.layer_norm(numpy.zeros((2, 2), 'f4'))\n"
        "    except c.OverloadedError: pass\n"
        "ours = {m for m in sys.modules if m.startswith('normserve.') and m.count('.') == 1}\n"
        "assert ours <= {f'normserve.{m}' for m in 'client codec errors memory socket_readers'.split()}, ours\n"
        "assert not {'torch', 'fastapi', 'starlette', 'pydantic', 'prometheus_client'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize(
    "array", [np.float32(3.0) + np.zeros((), np.float32), np.zeros((0, 4), np.float32), np.ones(3, np.float16)]
)
@pytest.mark.parametrize("is_writable", [True, False])
def test_an_array_of_any_size_is_sent_from_where_it_lies(array, is_writable):
    array = np.array(array)
    array.flags.writeable = is_writable
    sent = array_conversion.describe_array("x", array)
    assert (sent.shape, bytes(sent.data), sent.data.format) == (array.shape, array.tobytes(), "B")
    assert array_conversion.get_address(array) == array.__array_interface__["data"][0]
    assert not array.size or np.shares_memory(np.frombuffer(sent.data, np.uint8), array)


@pytest.mark.parametrize("size", [0, 3])
def test_memory_of_the_host_lies_there_whatever_torch_takes_for_default(size):
    with torch.device("meta"):
        made = array_conversion.make_array(memoryview(bytearray(4 * size)), DType.FLOAT32, (size,), as_torch=True)
    assert made.device.type == "cpu"


@pytest.mark.parametrize(
    ("tensor", "received"),
    [
        (torch.empty(2, device="meta"), "one on the device meta"),
        (torch.eye(2).to_sparse(), "the layout torch.sparse_coo"),
    ],
)
def test_a_torch_tensor_without_dense_data_is_refused(tensor, received):
    with pytest.raises(TypeError, match=f"^x must be a dense torch tensor, got {received}"):
        describe_array("x", tensor)


def test_a_shape_is_a_sequence_of_sizes():
    assert array_conversion.parse_shape([np.int64(2), 0]) == (2, 0)
    for shape in (4, None, (2.0,), "4"):
        with pytest.raises(TypeError, match="shape must be a sequence of integers, such as"):
            array_conversion.parse_shape(shape)
    with pytest.raises(ValueError, match=r"shape must have no negative size, got \[-1, 2\]"):
        array_conversion.parse_shape((-1, 2))
