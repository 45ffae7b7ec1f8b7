"""The setting whether the bits of a sample's result may depend on the number of samples in the batch.

Rows and contiguous groups are always computed in the same way.  If there are too few channels-last samples to use
the whole device, they are split into more parts, and the sums of more parts round differently.
"""

_required = False


def require_batch_invariance(required: bool) -> None:
    """Require from now on, or no longer require, that a sample's results have the same bits in any batch.

    It holds for all later launches of the process, and is initially not required.  It is meant for callers that
    put samples of several requests into one launch: every sample is then split as if it were alone.  Only
    channels-last groups on a GPU change; CPU tensors are computed in the same way either way.

    Args:
        required: True requires equal bits; False allows a split that depends on the number of samples.

    Examples:
        >>> import fusednorm
        >>> fusednorm.require_batch_invariance(True)
        >>> fusednorm.require_batch_invariance(False)
    """
    global _required
    _required = required


def is_batch_invariant() -> bool:
    """Return whether the bits of the next launch must not depend on the number of samples."""
    return _required
