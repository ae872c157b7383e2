"""How sure a recall is: intervals from resampling the questions."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


def interval_of_mean(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean of ``values`` [questions].

    Of a paired difference it is the paired interval: give right_a - right_b per question.
    """
    if not len(values):
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    # in parts, so that a million questions would not need ten thousand times as much memory
    means = np.concatenate(
        [generator.choice(values, (RESAMPLES // 20, len(values))).mean(axis=1, dtype=np.float64) for _ in range(20)]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def interval_of_share(right: int, count: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share, from 0 to 1: of ``count`` questions ``right`` were answered.

    It has a width also where all are right, which resampling does not give.
    """
    if count < 1:
        return float("nan"), float("nan")
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, weight = right / count, z * z / count
    middle = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)
