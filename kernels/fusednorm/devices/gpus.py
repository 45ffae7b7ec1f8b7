"""What plans ask of a GPU, of models that may be absent."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU as plans see it.

    Attributes:
        name: of the model.
        capability: its compute capability, major and minor.
        multiprocessors: how many it has.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def arch(self) -> int:
        """The compute capability as compilers write it: 90 for 9.0."""
        major, minor = self.capability
        return 10 * major + minor


H200 = Gpu("H200", (9, 0), 132)

GPUS = (
    Gpu("A100", (8, 0), 108),
    Gpu("A30", (8, 0), 56),
    Gpu("A10", (8, 6), 72),
    Gpu("A40", (8, 6), 84),
    Gpu("L40S", (8, 9), 142),
    Gpu("L4", (8, 9), 58),
    # The H100 with SXM has as many.
    H200,
    Gpu("H100 PCIe", (9, 0), 114),
    Gpu("B200", (10, 0), 148),
)
"""Models in data centres; for each architecture the one that is most often met first."""


def of_architectures(archs: frozenset[int]) -> tuple[Gpu, ...]:
    """The known models of some architectures, in the table's order."""
    return tuple(gpu for gpu in GPUS if gpu.arch in archs)
