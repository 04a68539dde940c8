"""`if`, `while` and `int()` on computed values: compute, decide, record on.

Read in this order:

1. `fibers`: Instances that take turns: each runs until it needs a value that is not computed yet.
2. `growth`: The capacity of the programs of rounds, and how it grows.
3. `steps`: `Steps`: what an instance records between two decisions, and whether it records the same
   again.
4. `recorded`: `Recorded`: what instances have recorded since the last round, told apart from
   anything else.
5. `recorded_graph`: `RecordedGraph`: all that was recorded, as one graph that grows, and the rows
   of its values.
6. `depths`: How many steps to run ahead: as many as earlier calls say, or else twice as many each
   time.
7. `scripts`: Scripts: the values that an instance will ask for, as far as they are there already.
8. `ahead`: Running ahead: steps of a loop that are computed before Python asks for them.
9. `workspace`: Values computed a few at a time: arenas that stay on the device and grow.
10. `moving`: `Moving`: which values depend on what a call is differentiated with respect to.
11. `padded_nodes`: Arrays of any length where Python decides on values.
12. `attempt`: `Attempt`: the rounds of a call, unless it has to begin again.
13. `rounds`: Control flow on values: compute what is recorded, decide, record on.
14. `continuous`: Rounds that instances join while they run, and leave as soon as they are done.
"""
