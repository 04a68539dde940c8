"""`batch` and `Batched`, the composition of everything else; what batches cost.

Read in this order:

1. `batched`: `batch`: the composition of everything else.
2. `calibrate`: What batches cost on this machine.
"""
