"""Prepared calls: the results of parsing and checking a request's bytes, kept for identical requests.

Jobs are validated once for tensors with equal names, dtypes and shapes.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from normserve.jobs.job import NormJob, NormSpec, RegisteredLayer
from normserve.jobs.memory_cost import MemoryCost
from normserve.jobs.validation import make_validated_job
from normserve.memory.tensors import HostTensor
from normserve.metrics.prepared_call_metrics import PreparedCallCounters

# An entry of more than this fraction of all bytes is not kept: it would evict too many others.
_LARGEST_FRACTION = 8

# Bounds of a kept check's memory: in all, for each tensor, and for each axis.
_CHECK_BYTES, _TENSOR_BYTES, _AXIS_BYTES = 2**10, 2**8, 2**6


class PreparedCallCache:
    """A cache of parsed and checked requests (prepared calls), keyed by the requests' bytes.  Tenants share
    its space fairly; the process has one, and each connection its own.

    An entry depends only on its key and on the registered layer that it was prepared with; it is stale once another
    layer, or none, has that name.  Keys, scopes, rates, permits and deadlines are no part of an
    entry: they are checked for each request.

    An entry belongs to the tenant that it was prepared for.  If all entries together have more than `max_bytes`,
    tenants that have more than an equal share lose entries, those first that have not been found again.  So a
    tenant within its share loses nothing to others, whatever they send.

    Not thread-safe: it belongs to the event loop's thread.

    Attributes:
        max_bytes: limit of the bytes of all entries.
        nbytes: the bytes of the present entries, as estimated by the callers of `try_store`.
    """

    def __init__(self, max_bytes: int, counters: PreparedCallCounters) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._hits, self._misses, self._evictions = counters
        self._entries: dict[Hashable, _PreparedCall] = {}
        self._tenants: OrderedDict[str, _TenantEntries] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable, layer: object = None) -> Any:
        """Return the prepared call stored under a key; None if there is none, or if it was prepared with another
        layer.

        Args: layer: the registered layer that the request names, if any.
        """
        entry = self._entries.get(key)
        if entry is not None:
            reference = entry.layer
            # The reference to a deleted layer returns None as well.
            if reference is layer or (reference is not None and reference() is layer is not None):
                self._hits.value += 1
                entry.is_recently_found = True
                return entry.value
            self._remove_entry(key, entry)
        self._misses.value += 1
        return None

    def try_store(self, key: Hashable, value: object, nbytes: int, tenant: str = "", layer: object = None) -> None:
        """Store a prepared call under a key, unless it exceeds an eighth of the cache.  If the cache is full,
        entries of tenants with more than an equal share are evicted.

        Args:
            nbytes: an upper bound of the memory of key and value.
            tenant: the sender of the request for which it was prepared.
            layer: the registered layer that it was prepared with, if any; the cache refers to it weakly.
        """
        if nbytes > self.max_bytes // _LARGEST_FRACTION:
            return
        replaced = self._entries.get(key)
        if replaced is not None:
            self._remove_entry(key, replaced)
        holder = self._tenants.get(tenant)
        if holder is None:
            holder = self._tenants[tenant] = _TenantEntries()
        entry = _PreparedCall(value, nbytes, tenant, None if layer is None else weakref.ref(layer))
        self._entries[key] = holder.entries[key] = entry
        holder.nbytes += nbytes
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            self._evict_by_second_chance(holder if self._is_over_share(holder) else self._find_over_share())

    def clear(self) -> None:
        """Discard all entries."""
        self._entries.clear()
        self._tenants.clear()
        self.nbytes = 0

    def _is_over_share(self, holder: "_TenantEntries") -> bool:
        """Return whether a tenant's entries exceed an equal share of the cache's bytes."""
        return holder.nbytes * len(self._tenants) > self.max_bytes

    def _find_over_share(self) -> "_TenantEntries":
        """Return the entries of a tenant that has more than an equal share of the cache.  There is one while the
        cache exceeds `max_bytes`.
        """
        while True:
            tenant, holder = next(iter(self._tenants.items()))
            if self._is_over_share(holder):
                return holder
            # The next search begins behind those that are within their shares.
            self._tenants.move_to_end(tenant)

    def _evict_by_second_chance(self, holder: "_TenantEntries") -> None:
        """Evict a tenant's oldest entry that was not found recently, by the second-chance (clock) rule."""
        entries = holder.entries
        key, entry = entries.popitem(last=False)
        while entry.is_recently_found:
            entry.is_recently_found = False
            entries[key] = entry
            key, entry = entries.popitem(last=False)
        entries[key] = entry
        self._remove_entry(key, entry)
        self._evictions.value += 1

    def _remove_entry(self, key: Hashable, entry: "_PreparedCall") -> None:
        """Remove an entry from the cache and from its tenant's entries, and subtract its bytes."""
        holder = self._tenants[entry.tenant]
        del self._entries[key], holder.entries[key]
        holder.nbytes -= entry.nbytes
        self.nbytes -= entry.nbytes
        if not holder.entries:
            del self._tenants[entry.tenant]


class _PreparedCall:
    """One entry of the cache: a prepared call with its bytes, tenant and layer.

    Attributes:
        layer: a weak reference to the layer that it was prepared with, None without one.
        is_recently_found: whether it was found since it was stored, or since it was last passed over.
    """

    __slots__ = ("is_recently_found", "layer", "nbytes", "tenant", "value")

    def __init__(self, value: object, nbytes: int, tenant: str, layer: Callable[[], object] | None) -> None:
        self.value = value
        self.nbytes = nbytes
        self.tenant = tenant
        self.layer = layer
        self.is_recently_found = False


class _TenantEntries:
    """One tenant's entries in the cache, from the oldest to the newest, and the sum of their bytes."""

    __slots__ = ("entries", "nbytes")

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, _PreparedCall] = OrderedDict()
        self.nbytes = 0


def prepare_job(
    prepared: PreparedCallCache,
    tenant: str,
    spec: NormSpec,
    tensors: Mapping[str, HostTensor],
    layer: RegisteredLayer | None,
    *,
    may_overwrite: bool = False,
) -> tuple[NormJob, MemoryCost]:
    """Make a job from a request's tensors and validate it, unless equal names, dtypes and shapes were validated
    before.

    The memory that the job needs is returned as well.

    Args:
        prepared: the cache of passed checks.
        tenant: the sender of the request.

    Raises:
        InvalidRequestError: as `make_validated_job`.
    """
    key = tenant, spec, *[(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    checked: tuple[NormSpec, MemoryCost] | None = prepared.find(key, layer)
    if checked is not None:
        return NormJob(checked[0], dict(tensors), layer, may_overwrite), checked[1]
    job, cost = make_validated_job(spec, tensors, layer, may_overwrite=may_overwrite)
    axes = sum([len(tensor.shape) for tensor in tensors.values()])
    nbytes = _CHECK_BYTES + _TENSOR_BYTES * len(tensors) + _AXIS_BYTES * axes
    prepared.try_store(key, (job.spec, cost), nbytes, tenant, layer)
    return job, cost
