"""Whether the bits of a sample's result may depend on the number of samples in the batch.

Rows and contiguous groups are always computed in the same way.  If there are too few channels-last samples to use
the whole device, they are split into more parts, and the sums of more parts round differently.
"""

_required = False


def require_batch_invariance(required: bool) -> None:
    """From now on let samples have the same bits in any batch, or, as at first, be quick where they are few.

    For callers that put samples of several askers into one launch.  All samples are then cut as if each were alone.
    """
    global _required
    _required = required


def is_batch_invariant() -> bool:
    """Whether bits of the next launch may not depend on the number of samples."""
    return _required
