"""GPU models for which kernels can be compiled in advance."""

from fusednorm.devices.device_properties import H200, GpuModel

GPUS = (
    GpuModel("A100", (8, 0), 108),
    GpuModel("A30", (8, 0), 56),
    GpuModel("A10", (8, 6), 72),
    GpuModel("A40", (8, 6), 84),
    GpuModel("L40S", (8, 9), 142),
    GpuModel("L4", (8, 9), 58),
    # The H100 with SXM has the same number of multiprocessors.
    H200,
    GpuModel("H100 PCIe", (9, 0), 114),
    GpuModel("B200", (10, 0), 148),
)
"""Models in data centres; for each architecture the most common model is first."""


def select_gpu_models(archs: frozenset[int]) -> tuple[GpuModel, ...]:
    """Select the GPU models of some architectures, in the table's order."""
    return tuple(gpu for gpu in GPUS if gpu.arch in archs)
