"""One minibatch from instances to results, and what is kept between minibatches.

- `records` finds or makes the graphs of instances.
- `programs` keeps kernels and programs.
- `plans` makes plans of what was recorded.

Read in this order:

1. `options`: The options of `jedbatch.batch` and `jedbatch.Lazy`, checked once and passed on as one
   value.
2. `records.arguments`: The arguments of a batched function: those that all instances share, and
   those of each.
3. `plans.outputs`: The form of a result: which rows of which arenas make up what a batched function
   returns.
4. `plans.indices`: Numbers that do nothing in a cell but name a row of a table, and whether there
   is such a row.
5. `plans.round`: Rounds: the nodes that are computed together while a function or a lazy scope goes
   on.
6. `records.degenerate`: Warnings of minibatches that hardly batch, before compiling (see
   `_graph.degeneracy`).
7. `records.record_cache`: `RecordCache`: the graphs of instances that are kept between minibatches.
8. `programs.types_in_use`: `TypesInUse`: which node types a new program should have besides those
   it is made for.
9. `programs.outside_values`: `OutsideValues`: what programs read besides instances: shared
   arguments, and arrays from outside.
10. `programs.identities`: The identity of a kernel: its program, written out, of the shared values
   that it reads.
11. `programs.program_cache`: `ProgramCache`: the kernels and programs that are kept between
   minibatches.
12. `programs.portable`: Programs as data, for which other processes can lower minibatches.
13. `programs.mapped`: Rows of arrays as instances: all have one structure, and run as `jax.vmap`
   would run them.
14. `session`: `Session`: what a batched function keeps between minibatches; `Minibatch`: what was
   recorded.
15. `records.recording`: The records of a minibatch: those that are known, and new ones.
16. `plans.verify`: Verifying plans as a whole: packed rows, what is returned, rounds (see
   `_program.verify`).
17. `plans.pipeline`: A recorded minibatch as a plan, and what running a plan gives.
18. `plans.copies`: Minibatches in which structures recur: planned once for all instances of a
   structure.
19. `plans.shards`: Minibatches cut over devices: every shard is planned, and all run one program.
20. `core`: `Core`: records and plans minibatches of a function.
"""
