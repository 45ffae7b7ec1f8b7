"""What the executor asks of a device, whatever it is."""

from collections.abc import Mapping
from typing import Protocol

from normserve.device import DeviceInfo
from normserve.errors import NormserveError
from normserve.jobs import Batch, Execution, Op
from normserve.tensors import HostTensor


class Backend(Protocol):
    """One device.  Every method is called on the one thread that owns it."""

    name: str

    def start(self) -> DeviceInfo:
        """Claim the device, compile or load what requests will need, and measure the copy roof.

        Raises:
            NormserveError: the device cannot be used.
        """

    def load(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> object:
        """Keep a layer's parameters where kernels read them, for as long as the returned object lives.

        What inputs of the parameters' dtype will need may be compiled.
        """

    def run(self, batch: Batch) -> Execution:
        """Run jobs of one class as one launch."""

    def translate(self, error: Exception) -> NormserveError | None:
        """Say what an exception out of `run` or `load` means; None when it is not the device's doing."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of device memory by kind (`allocated`, `reserved`, …); called from any thread."""
