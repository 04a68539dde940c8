"""Schedules of graphs: the frontier, heuristics, searches, state machines. NumPy only.

Read in this order:

1. `frontier`: The state of Algorithm 1: which nodes could run now.
2. `schedule`: A graph cut into batches, and how few batches there can be.
3. `encodings`: Encodings of a frontier: what a learned policy sees.
4. `compiled`: Algorithm 1 by the compiled core, for the policies of this package.
5. `components`: Schedules by component of types, and by rank.
6. `heuristics`: Heuristics: policies that need no learning.
7. `policy`: Policies, and Algorithm 1: runs a policy until every node of a graph is in a batch.
8. `search`: Searching for good schedules: teachers of learned policies, and their judges.
9. `fsm`: Policies as finite-state machines: tables from what a frontier looks like to a type.
"""
