"""Automatic batching of dynamic neural networks in JAX.

- `batch`: a function of one instance as a function of many; `Batched` is what it returns, and
  `Plan` what `Batched.plan` makes.
- `cell`: a function as one unit of batching.
- `lazy`: a scope in which imperative code is batched; `Lazy` makes others with options.
- `Exported`: a batched function without Python, as `Batched.export` returns and `load` reads it.
- `Graph`, `evaluate`: graphs prepared beforehand, and how a batched function computes one.
- `schedule`, `Schedule`, `policies`, `lower_bound`: cutting a graph into batches.
- `layout`, `Layout`: where values are kept, and how they are read.
- `learn`: a policy for graphs like these; `calibrate`: what batches cost on this machine.
- `Target`, `compiler_options`: what programs are made for, and what `jax.jit` should know of it.
- `cores`: the cores of a CPU as devices to cut minibatches over.
- `ragged`: operations between the rows of an instance, whose number varies: attention.
- `info`: what is installed here, and whether planning is compiled.
- `viz`: pictures of graphs, batches, time and memory.
- `errors`: what can go wrong, each with a page of help.

Each is loaded when it is first used, so that importing the package takes no time.

Modules to import by themselves: `jedbatch.models`, `jedbatch.data`, and `jedbatch.testing`, judges
for batched functions.
"""

import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jedbatch import errors, policies, ragged, viz
    from jedbatch._batch.batch import batch
    from jedbatch._batch.batched import Batched, Plan
    from jedbatch._batch.calibrate import Calibration, calibrate
    from jedbatch._batch.cores import cores
    from jedbatch._batch.info import info
    from jedbatch._export.exported import Exported
    from jedbatch._graph.graph import Graph
    from jedbatch._kernel.target import Target, compiler_options
    from jedbatch._layout.layout import Layout, layout
    from jedbatch._lazy.scope import Lazy, lazy
    from jedbatch._learn.candidates import learn
    from jedbatch._record.cell import cell
    from jedbatch._record.run.evaluate import evaluate
    from jedbatch._schedule.policy import schedule
    from jedbatch._schedule.schedule import Schedule, lower_bound

try:
    __version__ = importlib.metadata.version("jedbatch")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

__all__ = [
    "Batched",
    "Calibration",
    "Exported",
    "Graph",
    "Layout",
    "Lazy",
    "Plan",
    "Schedule",
    "Target",
    "batch",
    "calibrate",
    "cell",
    "compiler_options",
    "cores",
    "errors",
    "evaluate",
    "info",
    "layout",
    "lazy",
    "learn",
    "lower_bound",
    "policies",
    "ragged",
    "schedule",
    "viz",
]

_HOMES = {  # the module of each name that is no module
    "Batched": "_batch.batched",
    "Calibration": "_batch.calibrate",
    "Exported": "_export.exported",
    "Graph": "_graph.graph",
    "Layout": "_layout.layout",
    "Lazy": "_lazy.scope",
    "Plan": "_batch.batched",
    "Schedule": "_schedule.schedule",
    "Target": "_kernel.target",
    "batch": "_batch.batch",
    "calibrate": "_batch.calibrate",
    "cell": "_record.cell",
    "compiler_options": "_kernel.target",
    "cores": "_batch.cores",
    "evaluate": "_record.run.evaluate",
    "info": "_batch.info",
    "layout": "_layout.layout",
    "lazy": "_lazy.scope",
    "learn": "_learn.candidates",
    "lower_bound": "_schedule.schedule",
    "schedule": "_schedule.policy",
}

if not TYPE_CHECKING:  # for which there would be any name

    def __getattr__(name: str) -> Any:
        """Loads a public name when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
        value = globals()[name] = getattr(module, name) if name in _HOMES else module
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
