"""What instances compute, as NumPy arrays. Knows no JAX.

Read in this order:

1. `types`: Types of values and of nodes.
2. `operations`: The operations of nodes, and how their calls are recorded: records that a
   `Registry` interns.
3. `paths`: Arrays of variable length, and longest paths in graphs given by their edges.
4. `serialize`: Graphs in npz files: which arrays are in there, and how large they are, before any
   is read.
5. `graph`: What instances compute, as data.
6. `record`: `Record`: what recording an instance gave.
7. `prune`: Graphs of imperative code: without what nobody wants, and cut where nothing leads
   across.
"""
