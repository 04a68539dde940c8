"""Runs a function of one instance on symbols and writes down a graph.

Read in this order:

1. `instance_arrays`: The arrays of an instance: how they are found in any Python object, and
   replaced.
2. `instance_key`: Keys of instances: equal for instances that have the same graph.
3. `closures`: Identity of Python functions: equal keys for functions that compute the same.
4. `held`: The things that functions hold, and functions like them that hold other things.
5. `asking`: Whether Python asks what a number is, which is an operand while a cell is traced.
6. `cell`: `cell`: a function as one unit of batching.
7. `readers`: How environments read what they have seen once more: functions from a thing to what
   is in it.
8. `environment`: The values that a function reads besides its arguments, and detection of changes
   to them.
9. `escapes`: Traced values that outlive their trace: kept by the user, or by the caches of
   libraries.
10. `keys`: Keys that tell operations of JAX apart: keys of primitives, their parameters and
   jaxprs.
11. `arithmetic`: Arithmetic of Python on numbers that cells hold or instances have, before JAX
   sees a result.
12. `assumptions`: `Assumptions`: what is constant until more than a few variants of it were met,
   then data.
13. `lifting`: Numbers of instances in the bodies and closures of operations, as operands.
14. `element_functions`: Functions of one element of a list, computed once where the element is
   made.
15. `padded_calls`: Nodes with lists as nodes of types that have room for more elements.
16. `arity`: Cells that take lists of any length: one type for many lengths.
17. `shared_values`: Values that do not depend on the instance, and how they are computed before
   the nodes.
18. `shared_operands`: Shared arrays that cells get in place of values.
19. `unseen`: Values that the program of a cell reads and that its identity does not show.
20. `custom_rules`: Functions with a derivative rule of their own, as operations.
21. `registry`: Types, shared values and calls seen while recording, interned.
22. `failures`: What errors of users' functions say besides what JAX says: where they
   happened, and to what.
23. `symbols`: Symbolic values: tracers that have a type and no value, and how they are indexed.
24. `operators`: Indexing symbols, and Python's operators on them.
25. `watched`: Containers that may change, and whether they hold what they held before.
26. `fast_path`: Recording calls of cells the second time: by a description of their
   arguments.
27. `slow_path`: Recording calls of cells the first time, and those without a short description.
28. `filled_arrays`: Arrays that are filled with a number while something is recorded, such as
   `jnp.zeros(8)`.
29. `grouping`: `Grouping`: merges nodes or takes them apart, as a recorder sees it.
30. `containers`: Containers of shared arguments: cells get them whole, and know them by a token.
31. `static_numbers`: Numbers that JAX keeps as parameters of operations, as data: lengths of loops,
   and exponents.
32. `inlining`: Functions under `jax.jit` or `jax.checkpoint`, inlined where JAX traces them into
   many programs.
33. `floats`: Floats of instances: constants until many sets of them were met, then operands.
34. `recorder`: A recorder of what a function does to symbolic values.
35. `evaluate`: `evaluate`: graphs prepared with NumPy, computed with cells.
36. `thread_settings`: The settings of a thread, for work that goes on in another one.
37. `deep`: Recursion deeper than Python's limit.
38. `trace`: Recording a minibatch: every instance of it as a graph.
39. `granularity.call_sites`: Call sites: the places in the user's program where operations are
   performed.
40. `granularity.node_arrays`: `NodeArrays`: recorded nodes as arrays, to look at many of them at
   a time.
41. `granularity.known`: `KnownStretches`: stretches of operations that were met before, found by
   what they compute.
42. `granularity.tokens`: Tokens: operations by the parts they play, and what has been met before
   and after each.
43. `granularity.fuse`: Finding cells without marks: operations that always run together become
   one node.
44. `granularity.list_regions`: Nodes of a recording, and how they are written with some of them
   as one.
45. `granularity.list_uses`: Uses of lists: what is done with a list at one time, where it is read
   again and again.
46. `granularity.list_axes`: The axes of arrays that have a row for each element of a list.
47. `granularity.lists`: Lists outside of cells: what is done with a stack of values becomes one
   node.
48. `granularity.readout`: Read-outs: what instances do after their last cell becomes one node.
49. `granularity.projections`: Input projections: products of a cell that no recursion waits for
   become nodes of their own.
"""
