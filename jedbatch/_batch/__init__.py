"""`batch` and `Batched`, the composition of everything else; the costs of batches.

Read in this order:

1. `batched`: `Batched`: a function of many instances, made of one of one instance.
2. `batch`: the composition of everything else.
3. `calibrate`: The costs of batches on this machine.
"""
