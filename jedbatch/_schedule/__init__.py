"""Which nodes run together: the frontier, heuristics, searches, state machines. NumPy only.

Read in this order:

1. `frontier`: The state of Algorithm 1: which nodes could run now.
2. `schedule`: Cutting a graph into batches.
3. `search`: Searching for good schedules: teachers of learned policies, and their judges.
4. `fsm`: Policies as finite-state machines: tables from what a frontier looks like to a type.
"""
