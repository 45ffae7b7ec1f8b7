"""The setting whether the bits of a sample's result may depend on the number of samples in the batch.

Rows and contiguous groups are always computed in the same way.  If there are too few channels-last samples to use
the whole device, they are split into more parts, and the sums of more parts round differently.
"""

_required = False


def require_batch_invariance(required: bool) -> None:
    """Require from now on that a sample's bits are equal in any batch; initially this is not required.

    For callers that put samples of several requests into one launch.  Every sample is then split as if it were
    alone.
    """
    global _required
    _required = required


def is_batch_invariant() -> bool:
    """Return whether the bits of the next launch must not depend on the number of samples."""
    return _required
