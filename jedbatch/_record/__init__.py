"""Runs a function of one instance on symbols and writes down a graph.

- `instances` finds the arrays of an instance, and makes its key.
- `identity` says whether functions, primitives and what they read are the same as before.
- `cell` is the mark of a unit of batching.
- `types` interns node types, with the operands that cells share.
- `operations` are symbols, and what is recorded when JAX or Python computes with them.
- `calls` records calls of cells.
- `run` records the instances of a minibatch.
- `passes` rewrite recorded nodes.

Read in this order:

1. `instances.arrays`: The arrays of an instance: how they are found in any Python object, and
   replaced.
2. `instances.key`: Keys of instances: equal for instances that have the same graph.
3. `identity.functions`: Identity of Python functions: equal keys for functions that compute the
   same.
4. `identity.function_leaves`: The things that functions hold, and functions like them that hold
   other things.
5. `identity.accessors`: How environments read what they have seen once more: functions from a thing
   to what is in it.
6. `identity.environment`: The values that a function reads besides its arguments, and detection of
   changes to them.
7. `identity.primitives`: Keys that tell operations of JAX apart: keys of primitives, their
   parameters and jaxprs.
8. `identity.arithmetic`: Arithmetic of Python on numbers of instances, before JAX sees a result.
9. `identity.assumptions`: `Assumptions`: what is constant until more than a few variants of it were
   met, then data.
10. `identity.concretization`: Whether Python asks what something is that another object stands for:
   its type, or its identity.
11. `identity.number_operands`: Numbers of instances in the programs of operations, as operands.
12. `identity.unseen`: Values that the program of a cell reads and that its identity does not show.
13. `identity.escapes`: Traced values that outlive their trace: kept by the user, or by the caches
   of libraries.
14. `identity.mutation`: Containers and functions that may change, and whether they hold what they
   held before.
15. `cell`: `cell`: a function as one unit of batching.
16. `types.element_functions`: Functions of one element of a list, computed once where the element
   is made.
17. `types.padded_calls`: Nodes with lists as nodes of types that have room for more elements.
18. `types.list_arguments`: The lists among the arguments of cells.
19. `types.list_cells`: Cells that take lists of any length: one type for many lengths.
20. `types.shared_values`: Values that do not depend on the instance, and how they are computed
   before the nodes.
21. `types.shared_operands`: Shared arrays that cells and operations get in place of values.
22. `types.custom_rules`: Functions with a derivative rule of their own, as operations.
23. `types.tracing`: Programs of operations and cells that a registry meets for the first time.
24. `types.registry`: Types, shared values and calls seen while recording, interned.
25. `operations.failures`: Notes of errors of users' functions, besides what JAX says: where they
   happened, and to what.
26. `operations.symbols`: Symbolic values: tracers that have a type and no value, and how they are
   indexed.
27. `operations.known_operations`: Operations that were recorded before: they are recorded again by
   what they read.
28. `operations.lengths_told`: Lengths that Python knows, where it hands them to JAX as numbers.
29. `operations.stacking`: Stacks of rows of arrays of any length, or of what is computed from each
   row, from the arrays.
30. `operations.indexing`: Indexing symbols.
31. `operations.containers`: Containers of shared arguments: cells get them whole, and know them by
   a token.
32. `operations.filled_arrays`: Arrays that are filled with a number while something is recorded,
   such as `jnp.zeros(8)`.
33. `operations.static_numbers`: Numbers that JAX keeps as parameters of operations, as data:
   lengths of loops, and exponents.
34. `operations.inlining`: Functions under `jax.jit` or `jax.checkpoint`, inlined where JAX traces
   them into many programs.
35. `operations.sequences`: Sequences of numbers in instances that become arrays in the function:
   arrays of any length.
36. `operations.floats`: Floats of instances: constants until many sets of them were met, then
   operands.
37. `calls.fast_path`: Recording calls of cells the second time: by a description of their
   arguments.
38. `calls.slow_path`: Recording calls of cells the first time, and those without a short
   description.
39. `run.recorder`: A recorder of what a function does to symbolic values.
40. `run.evaluate`: `evaluate`: graphs prepared with NumPy, computed with cells.
41. `run.thread_settings`: The settings of a thread, for work that goes on in another one.
42. `run.recursion`: Recursion deeper than Python's limit.
43. `run.trace`: Recording a minibatch: every instance of it as a graph.
44. `run.constants`: Constants of instances: the arrays that a function makes itself, of any length.
45. `run.units`: Units: the functions of the user that would be cells of the operations that are
   recorded.
46. `passes.patterns`: Patterns: what several operations compute that become one node.
47. `passes.blocks`: Blocks of operations: a graph some of whose nodes have become one, and what
   they compute.
48. `passes.coalesce`: Finding cells without marks: operations that always run together become one
   node.
49. `passes.list_axes`: The axes of arrays that have a row for each element of a list.
50. `passes.list_regions`: Nodes of a recording, and how some of them become one.
51. `passes.list_uses`: Uses of lists: what is done with a list at one time, where it is read again
   and again.
52. `passes.lists`: Lists outside of cells: what is done with stacks of values becomes nodes that
   read the elements.
53. `passes.projections`: Input projections: products of a cell that no recursion waits for become
   nodes of their own.
"""
