"""A laid-out graph as integer tables, and one XLA program that interprets them.

Read in this order:

1. `tables`: Where things are in the int32 table of a minibatch.
2. `instructions`: The instructions of a program: chunks in the order in which they run, as rows
   of a table.
3. `runs`: Batches as what a program loops over.
4. `lower`: Lowering: a scheduled graph as integer tables and a signature.
5. `alive`: Which values of a minibatch have a cotangent.
6. `cotangent_rows`: In which rows the cotangents that operands send back are kept.
7. `lower_vjp`: Lowering the reverse: who reads what, as tables.
8. `plan`: `Plan`: a minibatch ready to run, and what it prints as.
9. `returned`: The values that a program returns, in pieces that are differentiated or not.
10. `arenas`: Rows of arenas in JAX: reading them, writing them in place, and keeping the two
   apart.
11. `interpreter`: Finding the next instruction of a table and running it, again and again, on the
   device.
12. `execute`: Running a program: one XLA program for every topology.
13. `executors`: Who runs a program.
14. `differentiable`: Batched programs as differentiable functions.
15. `host_arrays`: What enters the arenas and what comes out: values of instances as rows, and
   rows as results.
16. `verify`: Verifying plans: tables are run on symbols in place of values.
17. `verify_vjp`: Verifying the reverse of plans: tables are run on the names of cotangents (see
   `_program.verify`).
"""
