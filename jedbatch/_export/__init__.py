"""Batched functions without Python: one file computes any graph in another process.

Read in this order:

1. `archive`: One file with everything in it: a header as JSON, programs as StableHLO, and
   constants.
2. `encoding`: Value types, sizes and targets as JSON.
3. `trees`: Parameters found by their paths, and the structures of results.
4. `planned_kernels`: `PlannedKernel`: a kernel as planning knows it, without its program.
5. `programs`: Exported programs: StableHLO with the sizes that it was made for, and what runs it.
6. `binding`: Graphs of other origin as graphs of the node types of an exported model.
7. `planning`: From a graph to a plan for exported programs, or to an error that says what does not
   fit.
8. `exported`: `Exported`: a batched function without Python, which computes graphs.
9. `exporting`: `Batched.export`: from a batched function to programs that need no Python.
"""
