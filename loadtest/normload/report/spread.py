"""The confidence interval of the change of a number's mean between two sets of runs."""

import functools
import math
from collections.abc import Sequence

import numpy as np

# Points of the integral below; its error is far below the accuracy of such an interval.
_POINTS = 100_001


def compute_interval(before: Sequence[float], after: Sequence[float], confidence: float) -> tuple[float, float]:
    """Compute bounds of the difference of means, after less before, of numbers with equal spread in both sets.

    Args:
        before, after: a number for each run; three or more together, all finite.
        confidence: the fraction of such intervals that contain the true difference, below 1.
    """
    degrees = len(before) + len(after) - 2
    squares = sum(float(np.var(side)) * len(side) for side in (before, after))
    error = math.sqrt(squares / degrees * (1 / len(before) + 1 / len(after)))
    difference = float(np.mean(after)) - float(np.mean(before))
    reach = error * compute_student_quantile((1 + confidence) / 2, degrees)
    return difference - reach, difference + reach


@functools.cache
def compute_student_quantile(probability: float, degrees: int) -> float:
    """Compute the quantile of Student's distribution.

    With t = √degrees · tan(angle) its density is that of cos(angle)^(degrees - 1), which is integrated here.
    """
    angle = np.linspace(-math.pi / 2, math.pi / 2, _POINTS)
    density = np.cos(angle) ** (degrees - 1)
    sums = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return math.sqrt(degrees) * math.tan(float(np.interp(probability * sums[-1], sums, angle)))
