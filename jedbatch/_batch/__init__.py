"""`batch` and `Batched`, the composition of everything else; the costs of batches.

Read in this order:

1. `batched`: `batch`: the composition of everything else.
2. `calibrate`: The costs of batches on this machine.
"""
