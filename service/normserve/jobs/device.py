"""The description of a device."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceDescription:
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
