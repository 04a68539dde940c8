"""Draws of all synthetic data: lengths like those of real texts, words by their frequency."""

import numpy as np


def lengths(
    rng: np.random.Generator, count: int, mean: float, *, shape: float, least: float, most: float
) -> list[int]:
    """Random lengths from a shifted gamma distribution.

    Args:
      rng: draws.
      count: how many.
      mean: their mean, before those that are too long are cut.
      shape: of the gamma distribution; the larger, the more alike are the lengths.
      least: the shift, as a part of the mean.
      most: what none exceeds, as a multiple of the mean.

    Returns:
      `count` whole numbers, each at least 1.
    """
    drawn = mean * (least + (1 - least) * rng.gamma(shape, 1 / shape, count))
    return np.clip(np.rint(drawn), max(1, round(least * mean)), most * mean).astype(int).tolist()


def frequencies(num_words: int) -> np.ndarray:
    """Cumulative frequencies by Zipf's law: word r is drawn in proportion to 1 / (r + 3)."""
    frequency = 1 / np.arange(3, num_words + 3)
    return np.cumsum(frequency / frequency.sum())


def words(rng: np.random.Generator, cumulative: np.ndarray, count: int) -> list[int]:
    """`count` words of the given cumulative frequencies."""
    return np.searchsorted(cumulative, rng.random(count)).tolist()
