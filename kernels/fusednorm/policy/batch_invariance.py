"""Whether a sample's bits may depend on how many samples come with it.

Rows and contiguous groups are computed in one way however many there are.  Channels-last samples that are too few
to keep the device busy are cut finer than many, and sums of more parts round differently.
"""

_required = False


def require_batch_invariance(required: bool) -> None:
    """From now on let samples have the same bits in any company, or, as at first, be quick where they are few.

    For callers that put samples of several askers into one launch.  All samples are then cut as if each were alone.
    """
    global _required
    _required = required


def is_batch_invariant() -> bool:
    """Whether bits of the next launch may not depend on the number of samples."""
    return _required
