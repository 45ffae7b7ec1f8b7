"""GPU models for which kernels can be compiled in advance."""

from fusednorm.devices.device import H200, Gpu

GPUS = (
    Gpu("A100", (8, 0), 108),
    Gpu("A30", (8, 0), 56),
    Gpu("A10", (8, 6), 72),
    Gpu("A40", (8, 6), 84),
    Gpu("L40S", (8, 9), 142),
    Gpu("L4", (8, 9), 58),
    # The H100 with SXM has the same number of multiprocessors.
    H200,
    Gpu("H100 PCIe", (9, 0), 114),
    Gpu("B200", (10, 0), 148),
)
"""Models in data centres; for each architecture the most common model is first."""


def of_architectures(archs: frozenset[int]) -> tuple[Gpu, ...]:
    """The known models of some architectures, in the table's order."""
    return tuple(gpu for gpu in GPUS if gpu.arch in archs)
