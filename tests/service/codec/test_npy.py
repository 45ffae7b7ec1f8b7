import io
import struct
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from normserve.codec import npy
from normserve.errors import MalformedPayloadError, NormserveError, NotAcceptableError, UnsupportedDtypeError
from normserve.memory.tensors import DType, HostTensor


def saved(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), version=version)
    return memoryview(file.getvalue())


def by_hand(header, data=b"", version=(1, 0), length=None):
    raw = header if isinstance(header, bytes) else header.encode()
    width = "<H" if version[0] == 1 else "<I"
    start = b"\x93NUMPY" + bytes(version) + struct.pack(width, len(raw) if length is None else length)
    return memoryview(start + raw + data)


def header(descr="'<f4'", fortran_order="False", shape="(2,)"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n"


def as_array(tensor):
    order = "F" if tensor.fortran_order else "C"
    return np.frombuffer(tensor.data, tensor.dtype.value).reshape(tensor.shape, order=order)


arrays = hnp.arrays(st.sampled_from(["<f4", "<f2"]), hnp.array_shapes(min_dims=0, min_side=0, max_side=6))


@given(arrays, st.sampled_from([None, (1, 0), (2, 0), (3, 0)]))
def test_reads_what_numpy_writes(array, version):
    tensor = npy.decode(saved(array, version))
    assert tensor.shape == array.shape
    assert as_array(tensor).tobytes() == array.tobytes()


@given(arrays)
def test_numpy_reads_what_we_write(array):
    tensor = npy.decode(saved(array))
    pieces = npy.encode(tensor)
    assert len(pieces[0]) % npy.DATA_ALIGNMENT == 0
    assert pieces[1] is tensor.data
    loaded = np.load(io.BytesIO(b"".join(pieces)))
    assert loaded.dtype == array.dtype
    assert loaded.shape == array.shape
    assert loaded.tobytes() == array.tobytes()


def test_column_major_order_is_kept_as_such():
    array = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    tensor = npy.decode(saved(array))
    assert tensor.fortran_order
    np.testing.assert_array_equal(as_array(tensor), array)
    np.testing.assert_array_equal(np.load(io.BytesIO(b"".join(npy.encode(tensor)))), array)


def test_the_orders_of_a_vector_are_one():
    assert not npy.decode(by_hand(header(fortran_order="True"), bytes(8))).fortran_order


def test_data_are_a_view_of_the_body():
    body = bytearray(saved(np.zeros(4, np.float32)))
    tensor = npy.decode(memoryview(body))
    body[-4:] = struct.pack("<f", 7.0)
    assert as_array(tensor)[-1] == 7.0


@pytest.mark.parametrize(
    "text",
    [
        '{"descr": "<f4", "fortran_order": False, "shape": (2,)}',
        "{'shape':(2,),'fortran_order':False,'descr':'<f4'}",
        "{ 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , ) , }   \n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)}",
    ],
)
def test_a_header_may_be_laid_out_freely(text):
    assert npy.decode(by_hand(text, bytes(8))).nbytes == 8


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("shape", ["(4L, 8L)", "(4, 8L)", "(4L,8L)", "(32L,)", "(4L, 8L, )"])
def test_sizes_may_be_long_as_python_2_wrote_them(shape, version):
    body = by_hand(header(shape=shape), bytes(128), version=version)
    with pytest.warns(UserWarning, match="Python 2"):
        expected = np.load(io.BytesIO(body))
    assert npy.decode(body).shape == expected.shape


@pytest.mark.parametrize("order", ["<", "=", "|", ""])
@pytest.mark.parametrize("kind", ["f4", "f2"])
def test_this_machines_order_has_several_spellings(order, kind):
    array = np.arange(4).astype(kind)
    body = by_hand(header(descr=f"'{order}{kind}'", shape="(4,)"), array.tobytes())
    np.testing.assert_array_equal(np.load(io.BytesIO(body)), array)
    np.testing.assert_array_equal(as_array(npy.decode(body)), array)


NESTED = "(" * 30_000 + ")" * 30_000
LIES = {
    "nothing": memoryview(b""),
    "another magic": memoryview(b"\x93NUMPZ\x01\x00" + bytes(100)),
    "magic alone": memoryview(b"\x93NUMPY"),
    "half a version": memoryview(b"\x93NUMPY\x01"),
    "no header length": memoryview(b"\x93NUMPY\x01\x00\x10"),
    "version 0": by_hand(header(), bytes(8), version=(0, 0)),
    "version 1.1": by_hand(header(), bytes(8), version=(1, 1)),
    "version 4": by_hand(header(), bytes(8), version=(4, 0)),
    "version 9": by_hand(header(), bytes(8), version=(9, 0)),
    "header length beyond the body": by_hand(header(), bytes(8), length=60_000),
    "header length of 0xFFFFFFF0": by_hand(header(), bytes(8), version=(2, 0), length=0xFFFFFFF0),
    "header beyond the cap": by_hand(header() + " " * 70_000, bytes(8), version=(2, 0)),
    "header of no bytes": by_hand("", bytes(8)),
    "header is no dictionary": by_hand("('<f4', False, (2,))", bytes(8)),
    "header is half a dictionary": by_hand("{'descr': '<f4', 'fortran_order': False, 'shape': (2,", bytes(8)),
    "header is a call": by_hand("dict(descr='<f4', fortran_order=False, shape=(2,))", bytes(8)),
    "a control character for a space": by_hand(header() + "\x1d", bytes(8)),
    "a vertical tab for a space": by_hand("{'descr':\v'<f4', 'fortran_order': False, 'shape': (2,)}", bytes(8)),
    "text behind the dictionary": by_hand(header().strip() + " 1", bytes(8)),
    "invalid utf-8": by_hand(b"{'\xff': 1}", bytes(8), version=(3, 0)),
    "missing key": by_hand("{'descr': '<f4', 'fortran_order': False}", bytes(4)),
    "unknown key": by_hand("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 'y'}", bytes(8)),
    "duplicate key": by_hand("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'shape': (2,)}", bytes(8)),
    "no comma": by_hand("{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", bytes(8)),
    "two commas": by_hand("{'descr': '<f4',, 'fortran_order': False, 'shape': (2,)}", bytes(8)),
    "commas alone": by_hand("{,}"),
    "nested parentheses": by_hand(header(shape=NESTED), bytes(4)),
    "nested dictionaries": by_hand("{" * 30_000 + "}" * 30_000),
    "shape is a list": by_hand(header(shape="[2]"), bytes(8)),
    "shape is a number": by_hand(header(shape="2"), bytes(8)),
    "shape is a number in parentheses": by_hand(header(shape="(2)"), bytes(8)),
    "shape of commas": by_hand(header(shape="(,)"), bytes(4)),
    "shape with two commas": by_hand(header(shape="(1,,2)"), bytes(8)),
    "negative size": by_hand(header(shape="(-2,)"), bytes(8)),
    "float size": by_hand(header(shape="(2.0,)"), bytes(8)),
    "bool size": by_hand(header(shape="(True, 2)"), bytes(8)),
    "size with a leading zero": by_hand(header(shape="(02,)"), bytes(8)),
    "size in other digits": by_hand(header(shape="(²,)"), bytes(8), version=(3, 0)),
    "size of a thousand digits": by_hand(header(shape=f"({'9' * 1000},)"), bytes(8)),
    "blanks after the newline": by_hand(header() + "   ", bytes(8)),
    "a line before the dictionary": by_hand("\n" + header(), bytes(8)),
    "shape of blanks and junk": by_hand(header(shape="(1" + " " * 60_000 + "2,)"), bytes(8)),
    "rank of 5000": by_hand(header(shape="(" + "1," * 5000 + ")"), bytes(4)),
    "terabytes": by_hand(header(shape="(1099511627776,)"), bytes(8)),
    "product wraps to zero": by_hand(header(shape="(4294967296, 4294967296)")),
    "product overflows beside a zero": by_hand(header(shape="(1099511627776, 1099511627776, 0)")),
    "too few bytes": by_hand(header(), bytes(7)),
    "too many bytes": by_hand(header(), bytes(9)),
    "fortran_order is a number": by_hand(header(fortran_order="1"), bytes(8)),
    "fortran_order is a string": by_hand(header(fortran_order="'False'"), bytes(8)),
    "descr is a truth value": by_hand(header(descr="True"), bytes(8)),
    "objects": by_hand(header(descr="'|O'"), bytes(16)),
    "objects of eight bytes": by_hand(header(descr="'|O8'"), bytes(16)),
    "raw bytes of no size": by_hand(header(descr="'|V0'")),
    "raw bytes of two": by_hand(header(descr="'|V2'"), bytes(4)),
    "structure": by_hand(header(descr="[('a', '<f4')]"), bytes(8)),
    "subarray": by_hand(header(descr="('<f4', (2,))", shape="()"), bytes(8)),
    "elements of three bytes": by_hand(header(descr="'<f3'"), bytes(6)),
    "elements of two orders": by_hand(header(descr="'<=f4'"), bytes(8)),
    "elements by another name": by_hand(header(descr="'float32'"), bytes(8)),
    "a long size in version 3": by_hand(header(shape="(2L,)"), bytes(8), version=(3, 0)),
    "a size with two letters": by_hand(header(shape="(2LL,)"), bytes(8)),
    "a letter between digits": by_hand(header(shape="(1L0,)"), bytes(40)),
    "a letter alone": by_hand(header(shape="(L,)"), bytes(8)),
    "a comma-separated structure": by_hand(header(descr="'<f4,<f4'"), bytes(16)),
    "integers of a wrong size": by_hand(header(descr="'<i8'"), bytes(8)),
    "a pickled array": saved(np.zeros(2, "f4,i4")),
}


@pytest.mark.parametrize("body", LIES.values(), ids=LIES.keys())
def test_a_lie_is_malformed(body):
    with pytest.raises(MalformedPayloadError):
        npy.decode(body)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, ">f4"),
        np.zeros(2, ">f2"),
        np.zeros(2, "<f8"),
        np.zeros(2, "<i4"),
        np.zeros(2, "u1"),
        np.zeros(2, "?"),
        np.zeros(2, "<c8"),
        np.zeros(2, "<M8[ns]"),
        np.array(["text"]),
        np.array([b"bytes"]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_other_elements_are_unsupported_when_all_else_is_well_formed(array):
    with pytest.raises(UnsupportedDtypeError, match="little-endian float32 or float16"):
        npy.decode(saved(array))


def test_bfloat16_has_no_npy_form():
    with pytest.raises(NotAcceptableError, match="safetensors"):
        npy.encode(HostTensor(DType.BFLOAT16, (1,), memoryview(bytes(2))))


def test_encode_refuses_a_buffer_of_another_size():
    with pytest.raises(ValueError, match="must have 8 bytes, got 4"):
        npy.encode(HostTensor(DType.FLOAT32, (2,), memoryview(bytes(4))))


SCRAPS = [
    *"{}():,'\"- \n",
    "1",
    "2,",
    "'descr'",
    "'<f4'",
    "'>f2'",
    "'|O'",
    "'=f4'",
    "'f2'",
    "3L",
    "'shape'",
    "'fortran_order'",
    "False",
]
pieces = st.lists(st.sampled_from(SCRAPS), max_size=30).map("".join)


@given(
    st.binary(max_size=100)
    | st.builds(
        lambda text, data, version: bytes(by_hand(text, data, version)),
        pieces | st.builds(header, shape=pieces),
        st.binary(max_size=16),
        st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    )
)
def test_any_bytes_decode_or_raise_our_error(body):
    try:
        tensor = npy.decode(memoryview(body))
    except NormserveError:
        return
    assert tensor.nbytes == tensor.data.nbytes
    with warnings.catch_warnings():
        # Of sizes such as 4L.
        warnings.filterwarnings("ignore", message=".*created on Python 2")
        assert np.load(io.BytesIO(body)).shape == tensor.shape
