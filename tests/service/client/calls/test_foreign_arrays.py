"""Arrays of other libraries are sent from their memory, and results are arrays of the same library."""

import subprocess
import sys
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from normserve.client.calls import foreign_arrays
from normserve.client.calls.array_conversion import convert_tensor, describe_array
from normserve.client.calls.foreign_arrays import make_foreign_array, view_foreign_array

from tests.service.client.harness.fake_server import FakeServer, tensors_answer
from tests.service.client.harness.foreign_library import ForeignArray, PlainArray

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[:0],
        lambda x: x[0, 0, 0],
        lambda x: np.lib.stride_tricks.as_strided(x, (1, 3, 1, 4), np.multiply((7, 4, 5, 1), x.itemsize)),
    ],
    ids=["whole", "transposed", "strided", "empty", "scalar", "sizes of one with any strides"],
)
@pytest.mark.parametrize("is_writable", [True, False])
def test_an_array_survives(dtype, view, is_writable):
    owner = X.astype(dtype)
    owner.flags.writeable = is_writable
    memory = np.asarray(view(owner))
    sent = describe_array("x", ForeignArray(memory))
    assert (sent.shape, bytes(sent.data)) == (memory.shape, memory.tobytes())
    result = convert_tensor(sent, ForeignArray(memory))
    assert type(result) is ForeignArray
    np.testing.assert_array_equal(result.memory, memory)


def test_memory_is_not_copied_if_it_is_aligned():
    room = np.empty(200, np.uint8)
    start = -room.ctypes.data % 64
    for shift in (0, 4):
        x = room[start + shift :][: X.nbytes].view(np.float32)
        sent = describe_array("x", ForeignArray(x))
        assert np.shares_memory(np.frombuffer(sent.data, np.uint8), x)
        assert np.shares_memory(make_foreign_array(x, ForeignArray(X)).memory, x) == (shift == 0)


def test_what_a_library_refuses_stays_numpys():
    class Strict(ForeignArray):
        def __array_namespace__(self):
            return Strict

        @staticmethod
        def from_dlpack(exporter):
            raise BufferError("not of this kind")

    assert make_foreign_array(X, Strict(X)) is X


def test_a_library_that_takes_no_memory_of_others_gets_numpys():
    x = PlainArray(X)
    assert type(convert_tensor(describe_array("x", x), x)) is np.ndarray


def test_results_are_of_the_library_that_they_belong_to(connect):
    server = FakeServer(tensors_answer(dx=X, dweight=np.ones(4, np.float32), dbias=np.ones(4, np.float32)))
    result = connect(server).layer_norm_backward(X, ForeignArray(X), np.ones(4, np.float32), torch.ones(4))
    assert [type(each) for each in (result.dx, result.dweight, result.dbias)] == [
        ForeignArray,
        np.ndarray,
        torch.Tensor,
    ]


def test_lists_are_of_the_library_too(connect):
    server = FakeServer(tensors_answer(**{"y.0": X, "y.1": X}))
    result = connect(server).layer_norm([ForeignArray(X), ForeignArray(X)])
    assert [type(each) for each in result.y] == [ForeignArray] * 2


def test_dtypes_that_dlpack_lacks_are_converted(connect):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = ForeignArray(X.astype(ml_dtypes.bfloat16))
    y = torch.from_numpy(X).to(torch.float8_e4m3fn)
    body = safetensors.torch.save({"y": y, "scale": torch.ones(2, 3), "residual_out": torch.ones(X.shape)})
    headers = {"content-type": "application/x-safetensors"}
    server = FakeServer(httpx.Response(200, headers=headers, content=body))
    result = connect(server).layer_norm(x, residual=X, out_dtype=ml_dtypes.float8_e4m3fn)
    assert server.request.url.params["out_dtype"] == "float8_e4m3fn"
    sent = safetensors.torch.load(server.request.content)["x"]
    assert torch.equal(sent, torch.from_numpy(X).bfloat16())
    assert result.y.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(result.y.memory.astype(np.float32), y.float().numpy())


@pytest.mark.parametrize("kind", [np.float16, np.dtype("float16"), torch.float16, "float16"])
def test_a_dtype_may_be_given_in_any_way(connect, kind):
    server = FakeServer(tensors_answer(y=X.astype(np.float16)))
    connect(server).layer_norm(X, out_dtype=kind)
    assert server.request.url.params["out_dtype"] == "float16"


def test_a_result_is_moved_to_the_device_of_x():
    class Located(ForeignArray):
        def __init__(self, memory, device="first"):
            super().__init__(memory)
            self.device = device

        def to_device(self, device):
            return Located(self.memory, device)

        def __array_namespace__(self):
            return SimpleNamespace(from_dlpack=lambda array: Located(np.from_dlpack(array)), asarray=Located)

    for device in ("first", "second"):
        assert make_foreign_array(X, Located(X, device)).device == device


class ReadableNowhere:
    def __dlpack_device__(self):
        return 8, 0

    def __dlpack__(self, **options):
        raise BufferError("not here")


class OfUnknownType(ReadableNowhere):
    dtype = "other.bfloat16"

    def __array__(self, dtype=None, copy=None):
        raise ValueError("no such element type")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0, 2.0], r'__dlpack__ or .*, got a list of float; np.asarray\(x, dtype="float32"\) makes one$'),
        ([[1.0, 2.0]], r'got a list of list; np.asarray\(x, dtype="float32"\) makes one$'),
        (3.0, r'got float; np.asarray\(x, dtype="float32"\) makes one$'),
        (np.float32(3.0), r'got float32; np.asarray\(x, dtype="float32"\) makes one$'),
        ("x", "x must be a numpy array, a torch tensor, or an array with __dlpack__ or .*, got str$"),
        ([object()], "x.0 must be .*, got object$"),
        ([], r"x must be an array or a list of at least one array, got \[\]"),
        (None, "x must be an array or a list of at least one array, got None$"),
        ([X, None], "x must be an array or a list of at least one array, got None in a list"),
        (ReadableNowhere(), "x must be an array that numpy can read, got ReadableNowhere$"),
        (OfUnknownType(), "can read, got OfUnknownType of other.bfloat16; convert it to float32 or float16$"),
        (ForeignArray(X.astype(np.float64)), r"got float64; x\.astype\(np\.float32\) converts it"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"out_dtype": "bfloat16"}])
def test_what_is_no_array_is_refused_with_what_to_write(connect, value, text, options):
    server = FakeServer()
    for call in (connect(server).layer_norm, lambda x, **_: connect(server).layer_norm_backward(X, x)):
        with pytest.raises(TypeError, match=text):
            call(value, **options)
    assert not server.requests


class OnGpu:
    """An array on a GPU; numpy reads only what is copied for it."""

    __cuda_array_interface__: dict[str, object]

    def __init__(self, kind=2):
        self.kind, self.asked = kind, []

    def __dlpack_device__(self):
        return self.kind, 0

    def __dlpack__(self, **options):
        self.asked.append(options)
        if options.get("dl_device") != (1, 0):
            raise BufferError("on a GPU")
        return X.__dlpack__()


@pytest.mark.parametrize("kind", [2, 13])
def test_memory_of_a_gpu_is_copied_where_torch_has_no_cuda(monkeypatch, kind):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    x = OnGpu(kind)
    np.testing.assert_array_equal(view_foreign_array("x", x), X)
    assert x.asked[0]["dl_device"] == (1, 0)


def test_memory_of_a_gpu_is_torchs_where_torch_has_cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    taken = []
    monkeypatch.setattr(torch, "from_dlpack", lambda value: taken.append(value) or torch.ones(2))
    x = OnGpu()
    assert torch.equal(view_foreign_array("x", x), torch.ones(2))
    assert taken == [x]
    assert not x.asked


def test_memory_without_dlpack_is_read_once_the_device_is_idle(monkeypatch):
    class OldArray:
        __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012

    waited = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch, "as_tensor", lambda value, device: torch.ones(2))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert torch.equal(view_foreign_array("x", OldArray()), torch.ones(2))
    assert len(waited) == 1


def test_a_result_on_a_gpu_is_noted_for_streams_that_torch_does_not_know(monkeypatch):
    monkeypatch.setattr(foreign_arrays, "EXPORTED_DEVICES", set())

    class OnDevice(PlainArray):
        is_cuda = True

        def get_device(self):
            return 3

        def __dlpack_device__(self):
            return 2, 3

    made = make_foreign_array(OnDevice(X), ForeignArray(X))
    assert type(made.memory) is OnDevice
    assert sorted(foreign_arrays.EXPORTED_DEVICES) == [3]


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_result_on_a_gpu_that_cannot_be_shared_is_copied(monkeypatch, dtype):
    pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(foreign_arrays, "EXPORTED_DEVICES", set())

    class HostLibraryArray(ForeignArray):
        def __array_namespace__(self):
            return SimpleNamespace(from_dlpack=lambda exporter: exporter.missing, asarray=HostLibraryArray)

    tensor = torch.from_numpy(X).to(getattr(torch, dtype))
    made = make_foreign_array(tensor, HostLibraryArray(X))
    assert type(made) is HostLibraryArray
    assert made.dtype == dtype
    np.testing.assert_array_equal(made.memory.astype(np.float32), tensor.float().numpy())


def test_no_library_is_imported():
    program = (
        "import sys, numpy, httpx, normserve.client as c\n"
        "class Other:\n"
        "    def __init__(self, array): self.array = array\n"
        "    def __dlpack__(self, **options): return self.array.__dlpack__(**options)\n"
        "    def __dlpack_device__(self): return self.array.__dlpack_device__()\n"
        "server = httpx.MockTransport(lambda request: httpx.Response(429))\n"
        "with c.Client(transport=server, retries=c.RetryPolicy(tries=1)) as client:\n"
        "    try: client.layer_norm(Other(numpy.zeros((2, 2), 'f4')))\n"
        "    except c.OverloadedError: pass\n"
        "assert not {'torch', 'jax', 'cupy', 'tensorflow', 'ml_dtypes', 'cuda'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_arrays_of_jax(connect):
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X, jax.numpy.bfloat16)
    mean, rstd = X[..., 0].copy(), X[..., 1].copy()
    server = FakeServer(tensors_answer(y=X + 1, residual_out=X, mean=mean, rstd=rstd))
    result = connect(server).layer_norm(x, jax.numpy.ones(4), residual=X, out_dtype="float32", stats=True)
    sent = safetensors.torch.load(server.request.content)
    assert torch.equal(sent["x"], torch.from_numpy(X).bfloat16())
    assert torch.equal(sent["weight"], torch.ones(4))
    for name, right in {"y": X + 1, "residual_out": X, "mean": mean, "rstd": rstd}.items():
        found = getattr(result, name)
        assert isinstance(found, jax.Array)
        assert found.device == x.device
        np.testing.assert_array_equal(found, right)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda traced: connect(server).layer_norm(traced).y)(x)
