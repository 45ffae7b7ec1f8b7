import io
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import torch
from normserve.codec import media_types

X = np.zeros(2, np.float32)


def npz():
    file = io.BytesIO()
    np.savez(file, X)
    return file.getvalue()


def test_each_format_is_known_by_its_first_bytes():
    file = io.BytesIO()
    np.save(file, X)
    assert media_types.detect_binary_media_type(file.getvalue()) == media_types.NPY
    assert media_types.detect_binary_media_type(safetensors.numpy.save({"x": X})) == media_types.SAFETENSORS
    assert media_types.detect_binary_media_type(memoryview(safetensors.numpy.save({}))) == media_types.SAFETENSORS
    assert media_types.detect_binary_media_type(b"\x04\0\0\0\0\0\0\0 \n{}") == media_types.SAFETENSORS


@pytest.mark.parametrize("body", [b"", b"{}", b"a=1&b=2&c=3", b"\x80\x04\x95pickle", npz()])
def test_anything_else_is_unknown(body):
    assert media_types.detect_binary_media_type(body) is None


def test_both_names_of_safetensors_are_answered_alike():
    assert media_types.CANONICAL["application/vnd.safetensors"] == media_types.SAFETENSORS
    assert not media_types.UNTYPED & media_types.CANONICAL.keys()


def mangled(encoding):
    return media_types.NPY_MAGIC.decode("latin-1").encode(encoding, "replace")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04\x14\0\0\0\0", "a zip archive"),
        (b"\x80\x02\x8a\n", "a pickle"),
        (b"\x89HDF\r\n\x1a\n\0", "HDF5"),
        (b'{"x": [1, 2]}', "JSON"),
        (b"[[1.0, 2]]", "JSON"),
        (b"1.5,-2e3,4\n5", "CSV"),
        (b"1.5,-2e3\n4,5", "CSV"),
        (b"7", "CSV"),
        (mangled("utf-8") + b"\x01\0", "as bytes, not as text"),
        (mangled("ascii") + b"\x01\0", "as bytes, not as text"),
        (b"\x80\0\0\0\0\0\0\0x", ""),
        (b"a,b\n1,2", ""),
        (b"", ""),
        (bytes(9), ""),
    ],
)
def test_what_is_often_sent_by_mistake_is_named(content, said):
    assert media_types.detect_binary_media_type(content) is None
    found = media_types.suggest_supported_format(content)
    assert said in found
    assert bool(found) is bool(said)


def zipped(name, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def saved(save, *values):
    file = io.BytesIO()
    save(file, *values)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (saved(np.savez, np.ones(3)), "an .npz archive of numpy's"),
        (saved(lambda file: torch.save({"x": torch.ones(3)}, file)), "a .pt file of torch's"),
        # Its bytes have the time, and would be a name of the test that is another in each process.
        pytest.param(zipped("readme.txt", "no tensor"), "a zip archive: send", id="zip"),
        (b"PK\x03\x04" + bytes(22) + b"\xff\xff\0\0", "a zip archive: send"),
    ],
)
def test_archives_are_told_apart(content, said):
    assert media_types.suggest_supported_format(memoryview(content)).startswith(said)
