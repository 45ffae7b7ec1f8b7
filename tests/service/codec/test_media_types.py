import io

import numpy as np
import pytest
import safetensors.numpy
from normserve.codec import media_types

X = np.zeros(2, np.float32)


def npz():
    file = io.BytesIO()
    np.savez(file, X)
    return file.getvalue()


def test_each_format_is_known_by_its_first_bytes():
    file = io.BytesIO()
    np.save(file, X)
    assert media_types.sniff(file.getvalue()) == media_types.NPY
    assert media_types.sniff(safetensors.numpy.save({"x": X})) == media_types.SAFETENSORS
    assert media_types.sniff(memoryview(safetensors.numpy.save({}))) == media_types.SAFETENSORS


@pytest.mark.parametrize("body", [b"", b"{}", b"a=1&b=2&c=3", b"\x80\x04\x95pickle", npz()])
def test_anything_else_is_unknown(body):
    assert media_types.sniff(body) is None


def test_both_names_of_safetensors_are_answered_alike():
    assert media_types.CANONICAL["application/vnd.safetensors"] == media_types.SAFETENSORS
    assert not media_types.UNTYPED & media_types.CANONICAL.keys()
