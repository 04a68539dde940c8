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
6. `shared_values`: Values that do not depend on the instance, and how they are computed before
   the nodes.
7. `registry`: What has been met while recording, interned.
8. `symbols`: Symbolic values: tracers that have a type and no value, and how they are indexed.
9. `operators`: Indexing symbols, and Python's operators on them.
10. `fast_path`: How calls of cells are recorded the second time: by what their arguments are, at a
   glance.
11. `recorder`: A recorder of what a function does to symbolic values.
12. `evaluate`: `evaluate`: graphs prepared with NumPy, computed with cells.
13. `deep`: Recursion deeper than Python's limit.
14. `trace`: Recording a minibatch: every instance of it as a graph.
15. `granularity.call_sites`: Where in the user's program an operation is performed: its call
   site.
16. `granularity.inline`: Taking calls apart: the nodes inside of a node.
17. `granularity.fuse`: Finding the cells that nobody marked: operations that always run together
   become one node.
"""
