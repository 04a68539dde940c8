"""`batch` and `Batched`, the composition of everything else; the costs of batches.

Read in this order:

1. `warming`: What `Batched.warm` runs so that programs are compiled.
2. `nested`: Calls of a batched function inside of another one.
3. `ahead`: Planning ahead: minibatches are planned in a thread while the device computes.
4. `batched`: `Batched`: a function of many instances, made of one of one instance.
5. `batch`: the composition of everything else.
6. `calibrate`: The costs of batches on this machine.
7. `info`: The installation: versions, devices, and whether planning is compiled.
"""
