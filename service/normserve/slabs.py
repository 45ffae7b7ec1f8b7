"""The memory that a request body is received into."""

import numpy as np


class Slab:
    """One contiguous, writable piece of host memory, owned by one request.

    Large slabs come untouched from the operating system, in huge pages where it has them: what is never
    written costs nothing, and nothing is zeroed first.

    Attributes:
        view: all of it, as bytes; views cut out of it keep the memory alive.
    """

    def __init__(self, nbytes: int) -> None:
        self.view = np.empty(nbytes, np.uint8).data
