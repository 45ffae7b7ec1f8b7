"""The description of a device."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """A device's hardware, software and peak bandwidth.

    Attributes:
        name: of the hardware, for display.
        kind: "cuda" or "cpu".
        copy_bandwidth: bytes per second, read plus written, of a copy on the device: the peak for every kernel.
        versions: of the software that drives it.
    """

    name: str
    kind: str
    copy_bandwidth: float
    versions: Mapping[str, str]
