"""Launch configurations that may suit a GroupNorm backward pass: what `tune_group` times."""

from collections.abc import Iterator

from fusednorm.group_norm_launch import Backward, Sample, choose_backward


def candidates(sample: Sample, itemsize: int) -> Iterator[Backward]:
    """Configurations for samples of elements of `itemsize` bytes, each once."""
    yield choose_backward(sample, itemsize)
