"""Means over rounds and how far they can be trusted."""

import dataclasses
import math

import numpy

RESAMPLES = 2000
NARROW = 0.02  # half of an interval of log-ratios: +-2 %
CLOSE = 0.005


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over rounds, with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    rounds: int


def _bootstrap(samples, figure):
    """`figure` of the rows of `samples`, and its interval over resampled rows.
    The same samples give the same interval."""
    samples = numpy.asarray(samples, dtype=float)
    count = len(samples)
    if count == 0:
        raise ValueError("there is no round to take a mean of")
    generator = numpy.random.default_rng(1)
    draws = generator.integers(count, size=(RESAMPLES, count))
    values = figure(samples[draws].mean(axis=1))
    low, high = numpy.percentile(values, [2.5, 97.5])
    value = figure(samples.mean(axis=0)[numpy.newaxis])[0]
    return Estimate(float(value), float(low), float(high), count)


def ratio(numerators, denominators):
    """The geometric mean of the ratios of two sides, by round."""
    logs = numpy.log(numerators) - numpy.log(denominators)
    return _bootstrap(logs, numpy.exp)


def mean(figures):
    """The geometric mean of a side's own figures, by round."""
    return _bootstrap(numpy.log(figures), numpy.exp)


def ratio_of_differences(a, a_base, b, b_base):
    """mean(a - a_base) / mean(b - b_base): for differences that may be nearly
    zero, of which there is no logarithm."""
    columns = numpy.stack(
        [numpy.subtract(a, a_base), numpy.subtract(b, b_base)], axis=1
    )
    return _bootstrap(columns, lambda means: means[:, 0] / means[:, 1])


def mean_difference(a, a_base):
    return _bootstrap(numpy.subtract(a, a_base), lambda means: means)


def is_narrow(estimate):
    """Of a ratio: the interval is at most +-2 %."""
    return (math.log(estimate.high) - math.log(estimate.low)) / 2 <= NARROW


def is_close(estimate):
    """Of a figure far below 1, or below 0: the interval is at most +-0.005."""
    return (estimate.high - estimate.low) / 2 <= CLOSE


def round_figure(seconds_by_rank):
    """Of one side in one round: the median step of the slowest rank."""
    return max(float(numpy.median(seconds)) for seconds in seconds_by_rank)
