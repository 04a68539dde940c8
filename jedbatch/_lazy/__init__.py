"""Imperative code in a scope.

Read in this order:

1. `futures`: Futures: what operations return inside of a lazy scope, and what they are
   afterwards.
2. `recorder`: Records what happens inside of a lazy scope, and computes it when it has to.
3. `scope`: `lazy`: just-in-time dynamic batching of imperative code.
"""
