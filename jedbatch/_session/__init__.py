"""One minibatch from instances to results, and what is kept between minibatches.

Read in this order:

1. `outputs`: The form of a result: which rows of which arenas make up what a batched function
   returns.
2. `indices`: Numbers that do nothing in a cell but name a row of a table, and whether there is
   such a row.
3. `session`: What a batched function keeps: types, graphs of instances, kernels and programs.
4. `record_cache`: The records of a minibatch: those that are known, and new ones.
5. `verify`: Verifying plans as a whole: packed rows, what is returned, rounds (see
   `_program.verify`).
6. `pipeline`: A recorded minibatch as a plan, and what running a plan gives.
"""
