"""A library of arrays that the client does not know: its arrays show their memory by DLPack."""

from types import SimpleNamespace

import numpy as np


class PlainArray:
    """An array of a library that makes none of others' memory, over that of a numpy array or of a torch tensor."""

    def __init__(self, memory):
        self.memory = memory
        self.shape, self.dtype, self.ndim = memory.shape, memory.dtype, memory.ndim

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


class ForeignArray(PlainArray):
    """An array of this library."""

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.memory, dtype=dtype)

    def __array_namespace__(self):
        return library


def from_dlpack(exporter):
    if exporter.__dlpack_device__()[0] == 1:
        return ForeignArray(np.from_dlpack(exporter))
    return ForeignArray(exporter)


def asarray(array):
    return ForeignArray(np.array(array))


library = SimpleNamespace(from_dlpack=from_dlpack, asarray=asarray)
