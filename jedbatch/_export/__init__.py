"""Batched functions without Python: one file computes any graph in another process.

Read in this order:

1. `archive`: One file with everything in it: a header as JSON, programs as StableHLO, and
   constants.
2. `trees`: Parameters found by their paths, and the structures of results.
3. `encoding`: Kernels, programs and types as JSON.
4. `programs`: Exported programs: StableHLO with the sizes that it was made for, and what runs it.
5. `binding`: Graphs of other origin as graphs of the node types of an exported model.
6. `planning`: From a graph to a plan for exported programs, or to an error that says what does not
   fit.
7. `exported`: `Exported`: a batched function without Python, which computes graphs.
8. `exporting`: `Batched.export`: from a batched function to programs that need no Python.
"""
