"""POSTs the sample that a server offers back to it, and checks the layer norm that comes out.

Usage: check_sample.py URL
"""

import array
import sys
import urllib.request
from statistics import fmean

_COLS = 8
_EPS = 1e-5
_TOLERANCE = 1e-5


def floats(npy: bytes) -> array.array:
    """The values of a little-endian float32 array in npy format 1.0."""
    header = int.from_bytes(npy[8:10], "little")
    return array.array("f", npy[10 + header :])


def layer_norm(row: array.array) -> list[float]:
    """As its definition has it."""
    mean = fmean(row)
    variance = fmean((value - mean) ** 2 for value in row)
    return [(value - mean) / (variance + _EPS) ** 0.5 for value in row]


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/sample.npy", timeout=10) as response:
        sample = response.read()
    request = urllib.request.Request(
        f"{url}/v1/layer_norm", sample, {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        got = floats(response.read())
        timing = response.headers["Server-Timing"]
    x = floats(sample)
    expected = [value for first in range(0, len(x), _COLS) for value in layer_norm(x[first : first + _COLS])]
    if len(got) != len(expected):
        sys.exit(f"expected {len(expected)} values, got {len(got)}")
    worst = max(abs(a - b) for a, b in zip(got, expected, strict=True))
    if worst > _TOLERANCE:
        sys.exit(f"expected layer_norm(sample) within {_TOLERANCE}, got an error of {worst}")
    print(f"the sample is normalised within {worst:.1e} ({timing})")


if __name__ == "__main__":
    main(*sys.argv[1:])
