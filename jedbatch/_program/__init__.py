"""A laid-out graph as integer tables, and one XLA program that interprets them.

Read in this order:

1. `tables`: The places of things in the int32 table of a minibatch.
2. `capacity`: `Capacity`: the sizes that a program is compiled for, and how programs are found
   and grow.
3. `instructions`: The instructions of a program: chunks in the order in which they run, as rows
   of a table.
4. `runs`: Batches as what a program loops over.
5. `signature`: `Signature`: what is compiled to run minibatches.
6. `widths`: Which widths of chunks a program is compiled in: those that save more than a little.
7. `placement`: `Placement`: a scheduled graph whose values have arenas and rows, and the sizes
   that it needs.
8. `lower`: Lowering: a scheduled graph as an integer table.
9. `round_template`: `RoundTemplate`: a round met before, as a table to be shifted.
10. `alive`: The values of a minibatch that have a cotangent.
11. `cotangent_rows`: In which rows the cotangents that operands send back are kept.
12. `lower_vjp`: Lowering the reverse: who reads what, as tables.
13. `fit`: Signatures for minibatches: whether a program fits one, and a new one with room for
   it.
14. `output_spec`: `OutputSpec`: how the rows that a program returns become results.
15. `memory_use`: Bytes that the results of a minibatch take, and how they are written.
16. `sharded`: `DeviceAxis` and `Route`: minibatches that are cut over the devices of an axis of a
   mesh.
17. `plan`: `Plan`: a minibatch ready to run, and its printed summary.
18. `returned`: The values that a program returns, in pieces that are differentiated or not.
19. `pullback`: `Pullback`: the reverse of a program, and its tables, by what of the results is
   differentiated.
20. `arenas`: Rows of arenas in JAX: reading them, writing them in place, and keeping the two
   apart.
21. `rows`: Rows that a chunk reads from arrays, all at once, and rows that it writes, in place.
22. `interpreter`: Finding the next instruction of a table and running it, again and again, on
   the device.
23. `lanes`: Running a kernel over lanes: forwards, backwards, and the gradients of its weights.
24. `stopped`: Loops that were stopped (`max_steps`): the nodes they are in, and the error that
   names them.
25. `execute`: Running a program: one XLA program for every topology.
26. `executors`: `Executor`: each half of a program as one XLA program.
27. `differentiable`: Batched programs as differentiable functions.
28. `device_axis`: Running a program on every device of an axis, each with a shard of the minibatch.
29. `host_arrays`: Inputs and outputs of arenas: values of instances as rows, and rows as
   results.
30. `verify`: Verifying plans: tables are run on symbols in place of values.
31. `verify_vjp`: Verifying the reverse of plans, on the names of cotangents (see
   `_program.verify`).
"""
