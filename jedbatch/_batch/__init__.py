"""`batch` and `Batched`, the composition of everything else; the costs of batches.

Read in this order:

1. `warming`: What `Batched.warm` runs so that programs are compiled.
2. `batched`: `Batched`: a function of many instances, made of one of one instance.
3. `batch`: the composition of everything else.
4. `calibrate`: The costs of batches on this machine.
"""
