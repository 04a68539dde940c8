"""`if`, `while` and `int()` on computed values: compute, decide, record on.

Read in this order:

1. `fibers`: Instances that take turns: each runs until it needs a value that is not computed yet.
2. `growth`: The capacity of the programs of rounds, and how it grows.
3. `workspace`: Values computed a few at a time: arenas that stay on the device and grow.
4. `rounds`: Control flow on values: compute what is recorded, decide, record on.
5. `continuous`: Rounds that instances join while they run, and leave as soon as they are done.
"""
