"""The devices: `cpu` and `cuda` each drive one kind of device; the executor calls them through `interface`."""

import os

# Before torch allocates for the first time.  In 4 KiB pages a fresh 64 MiB tensor costs 20 ms of page faults,
# twice the time of normalising it; in huge pages 1 ms.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # noqa: TID251
