"""Runs a function of one instance on symbols and writes down a graph.

Read in this order:

1. `instances`: Reading an instance: which of it is arrays, and when two instances are the same.
2. `cell`: `cell`: a function as one unit of batching, and when two functions are the same.
3. `environment`: The values that a function reads besides its arguments, and detection of changes
   to them.
4. `escapes`: Traced values that outlive their trace: kept by the user, or by the caches of
   libraries.
5. `keys`: Keys that tell operations of JAX apart: keys of primitives, their parameters and
   jaxprs.
6. `registry`: What has been met while recording, interned.
7. `symbols`: Symbolic values: tracers that have a type and no value, and how they are indexed.
8. `operators`: Indexing symbols, and Python's operators on them.
9. `fast_path`: How calls of cells are recorded the second time: by what their arguments are, at a
   glance.
10. `recorder`: A recorder of what a function does to symbolic values.
11. `evaluate`: `evaluate`: graphs prepared with NumPy, computed with cells.
12. `deep`: Recursion deeper than Python's limit.
13. `trace`: Recording a minibatch: every instance of it as a graph.
14. `granularity.call_sites`: Where in the user's program an operation is performed: its call
   site.
15. `granularity.inline`: Taking calls apart: the nodes inside of a node.
16. `granularity.fuse`: Finding the cells that nobody marked: operations that always run together
   become one node.
"""
