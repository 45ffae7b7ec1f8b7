"""What the executor asks of a device, whatever it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from normserve.errors import NormserveError
from normserve.jobs import Batch, Execution
from normserve.tensors import HostTensor


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is and what it can do at best.

    Attributes:
        name: of the hardware, for people.
        kind: "cuda" or "cpu".
        copy_bandwidth: bytes a second, read plus written, of a copy on the device: the roof of every kernel.
        versions: of the software that drives it.
    """

    name: str
    kind: str
    copy_bandwidth: float
    versions: Mapping[str, str]


class Backend(Protocol):
    """One device.  Every method is called on the one thread that owns it."""

    name: str

    def start(self) -> DeviceInfo:
        """Claim the device, compile or load what requests will need, and measure the copy roof.

        Raises:
            NormserveError: the device cannot be used.
        """

    def load(self, weight: HostTensor, bias: HostTensor | None) -> object:
        """Keep a layer's parameters where kernels read them, for as long as the returned object lives."""

    def run(self, batch: Batch) -> Execution:
        """Run jobs of one class as one launch."""

    def translate(self, error: Exception) -> NormserveError | None:
        """Say what an exception out of `run` or `load` means; None when it is not the device's doing."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of device memory by kind (`allocated`, `reserved`, …); called from any thread."""
