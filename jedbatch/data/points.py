"""Sets of points in the plane: nothing but a synthetic kind, for models of sets.

A record is `(points, label)`: a tuple of pairs `(x, y)`, whose order means nothing, and the number
of the curve that they lie on.
"""

import numpy as np

from jedbatch import checks
from jedbatch.data import draws

Points = tuple[tuple[tuple[float, float], ...], int]  # (points, label)


@checks.sizes
def synthetic_points(
    num_sets: int, *, seed: int = 0, num_labels: int = 4, mean_size: float = 40
) -> list[Points]:
    """Random sets of points on flowers, which have a petal more with every label.

    Sizes follow a shifted gamma distribution (a quarter of the mean at least). In polar coordinates
    points of label k lie at random angles near r = 1 + cos((k + 1) angle) / 2, so a single point
    says little about the label.

    Args:
      num_sets: how many.
      seed: of the random generator; the same seed gives the same sets.
      num_labels: labels are numbers below it.
      mean_size: points per set on average.

    Returns:
      Records `(points, label)`; coordinates have three decimals.

    Examples:
      >>> from jedbatch.data import synthetic_points
      >>> points, label = synthetic_points(1, seed=1, mean_size=3)[0]
      >>> {len(point) for point in points}
      {2}
    """
    rng = np.random.default_rng(seed)
    sets = []
    for size in draws.lengths(rng, num_sets, mean_size, shape=3, least=0.25, most=4):
        label = int(rng.integers(num_labels))
        angle = rng.uniform(0, 2 * np.pi, size)
        radius = 1 + np.cos((label + 1) * angle) / 2 + rng.normal(0, 0.05, size)
        xy = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).round(3)
        sets.append((tuple((x, y) for x, y in xy.tolist()), label))
    return sets
