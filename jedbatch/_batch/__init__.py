"""`batch` and `Batched`, the composition of everything else; the costs of batches.

Read in this order:

1. `warming`: What `Batched.warm` runs so that programs are compiled.
2. `nested`: Calls of a batched function inside of another one.
3. `pickling`: Pickling what other processes are sent: functions by name where they have one there.
4. `planner`: `Planner`: minibatches are planned in other processes, and attached here.
5. `processes`: Planning in processes of its own: `Batched.plans(..., workers=N)`.
6. `ahead`: Planning ahead: minibatches are planned in a thread while the device computes.
7. `batched`: `Batched`: a function of many instances, made of one of one instance.
8. `batch`: the composition of everything else.
9. `calibrate`: The costs of batches on this machine.
10. `info`: The installation: versions, devices, and whether planning is compiled.
"""
