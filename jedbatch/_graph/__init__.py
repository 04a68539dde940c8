"""The computation of instances as NumPy arrays. Knows no JAX.

Read in this order:

1. `operations`: The operations of nodes, and how their calls are recorded: records that a
   `Registry` interns.
2. `types`: Types of values and of nodes.
3. `paths`: Arrays of variable length, and longest paths in graphs given by their edges.
4. `union_find`: Union-find: sets of things that are found to belong together, two at a time.
5. `analysis`: Relations between the types of a graph, from the type of every node and the edges
   alone.
6. `joining`: The columns of instances of several graphs, one after the other.
7. `serialize`: Graphs in npz files: which arrays are in there, and how large they are, before any
   is read.
8. `arguments`: Checks of the arrays that `Graph.from_dag` is given.
9. `inputs`: The values that enter a graph: where they come from, and those of many instances
   as columns.
10. `invariants`: The invariants of graphs, such as those that come from files.
11. `graph`: Dataflow graphs of instances, as data.
12. `straight`: Computing calls one after the other, without a program: on arrays, symbols or what
   is traced.
13. `rewrite`: `rewrite`: a graph with some nodes in place of others; `with_inputs`: with other
   inputs.
14. `degeneracy`: Graphs that hardly batch.
15. `record`: `Record`: what recording an instance gave.
16. `structures`: Instances of one structure: those whose graphs differ in the values of their
   inputs alone.
17. `prune`: Graphs of imperative code: without nodes that are not read, and cut where no edge
   leads across.
"""
