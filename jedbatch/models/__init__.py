"""Models written for one instance, with public names only.

- `tree`, `treegru`, `mvrnn`, `twotypes`: binary trees.
- `childsum`: dependency trees, in pairs.
- `tagger`, `translation`: sentences.
- `transformer`: sentences as arrays, of words and of pairs.
- `deepsets`: sets of points.
- `lattice`: characters with the words they spell.
- `WORKLOADS`: each with the data it eats and a trained policy; `Workload` is for your own.
"""

import importlib

try:
    importlib.import_module("flax.nnx")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`jedbatch.models` needs {error.name}, which is not installed; "
        "write `pip install 'jedbatch[models]'`. The rest of `jedbatch` works without."
    ) from error

from jedbatch.models import (
    childsum,
    deepsets,
    lattice,
    mvrnn,
    tagger,
    transformer,
    translation,
    tree,
    treegru,
    twotypes,
)
from jedbatch.models.workloads import WORKLOADS, Workload

__all__ = [
    "WORKLOADS",
    "Workload",
    "childsum",
    "deepsets",
    "lattice",
    "mvrnn",
    "tagger",
    "transformer",
    "translation",
    "tree",
    "treegru",
    "twotypes",
]
