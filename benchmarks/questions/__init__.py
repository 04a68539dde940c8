"""Scripts that answer one question each, named in their first line; `--help` explains the numbers.

`topologies` has the graphs that `memory` and `policies` count on.
"""
