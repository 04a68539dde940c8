"""JAX at the edge: programs equation by equation, symbolic dimensions, the state of JAX.

Public names of JAX only; differences between its versions are in `versions`.

Read in this order:

1. `configuration`: The state of JAX in this thread: its configuration, what is being traced, where
   arrays are.
2. `versions`: Differences between versions of JAX: 0.10, 0.11 and 0.12.
3. `closed_over`: What derivative rules of the user's may not read: values that are gone when JAX
   runs them.
4. `interpret`: Handling programs of JAX equation by equation, with public names only.
5. `known_functions`: Elementwise functions of JAX with a derivative rule of their own.
6. `early_part`: A program in two: products that need some operands only, and all else.
7. `symbolic_dims`: Extents that differ from instance to instance, as JAX's symbolic dimensions.
8. `numbers`: Numbers in programs, as operands.
9. `storage`: Storage of values: each is a row of an array that holds values of one shape and dtype.
10. `identity`: Identity of values: the keys of everything that is remembered.
11. `zeros`: Symbolic zeros: results that are not differentiated are not pulled back.
12. `gates`: Gates: what comes back through one result stays apart from what comes through another.
13. `sums`: Results of a program added to totals, in place where the program puts rows into zeros.
14. `meshes`: Types of arrays where a mesh is set: how they are cut over it, and along which axes
   they vary.
15. `derivatives`: Derivatives of programs whose loops JAX cannot reverse: of any order, in both
   modes.
16. `symmetric`: Derivatives of second order: a reverse that is a loop, pulled back by symmetry.
17. `monoids`: Reductions as monoids: what joins two values, and the identity, which changes no
   value.
18. `padding.axis_rules`: The rules of operations along an axis: each row by itself, or rows
   together.
19. `padding.flat_programs`: Programs without calls: what is called stands in place of the call.
20. `padding.indexing`: Rows read and written by index: gathers and scatters among the rows of an
   instance.
21. `padding.row_rules`: Running a row-wise equation for one row.
22. `padding.padded_loops`: Loops and branches on padded arrays, of as many steps as each instance
   needs.
23. `padding.singular`: Operations whose derivatives may be infinite in the padding of an instance,
   and only there.
24. `padding.padded_rules`: Running equations for one instance whose arrays are padded.
25. `list_reductions`: Reductions over the elements of a list that exist, where there is room for
   more.
26. `list_values`: The values of a program of a list, as what they are for lists of any length (see
   `rolling`).
27. `list_arrays`: Operations on arrays that are made of all elements of a list.
28. `list_expressions`: Expressions of programs of lists of any length.
29. `rolling`: Programs of a list of values as programs of lists of any length.
30. `single_instances`: Operations of Equinox that know of `vmap`, as what they do for a single
   instance.
31. `trip_counts`: Trip counts of loops, as far as their programs say.
32. `lane_steps`: Counts of what lanes do where values decide: the steps that run, and the lanes in
   them.
33. `lane_loops`: A `while_loop` that is mapped over lanes, as functions of constants and carries of
   some lanes.
34. `registers`: Basic blocks, and the registers of values that live between them.
35. `basic_blocks`: A program cut at its control flow into basic blocks, for lanes at different
   places in it.
36. `program_counters`: A machine for lanes that are at different places of a program.
37. `bounded`: Loops with a bound: a `while_loop` that does not end stops after so many trips, and
   says so.
38. `branch_residuals`: Residuals of branches: none but the operands, which are there anyway.
39. `branches`: Branches, each for its own lanes: forwards, and in reverse for weights that all
   lanes share.
40. `single_kernel`: Loops as single kernels of a CPU: compiled by XLA as one function, without a
   call per operation.
41. `packed_loops`: Loops with little work on a CPU: some lanes at a time, exchanged inside of one
   kernel.
42. `divergent`: Loops and branches that values decide on, for many lanes at a time, without lock
   step.
43. `transfers`: Transfers between host and device, where `jax.transfer_guard("disallow")` is set.
44. `native_calls`: Functions of the compiled core that XLA:CPU calls in programs.
45. `uninitialized`: Arrays that are written before they are read, which nobody needs to fill with
   zeros first.
46. `unknown_numbers`: Numbers that XLA does not know, so that operations which differ in them alone
   are compiled once.
47. `faults`: Cells that make NaNs, found where `jax_debug_nans` or `jax_debug_infs` is set.
"""
