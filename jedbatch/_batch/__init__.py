"""`batch` and `Batched`, the composition of everything else; the costs of batches.

Read in this order:

1. `on_devices`: Minibatches over several devices: what `plan`, `apply` and `warm` do with a mesh.
2. `warming`: `Batched.warm`: what minibatches to come need is compiled ahead of time.
3. `nested`: Calls of a batched function inside of another one.
4. `pickling`: Pickling what other processes are sent: functions by name where they have one there.
5. `planner`: `Planner`: minibatches are planned in other processes, and attached here.
6. `processes`: Planning in processes of its own: `Batched.plans(..., workers=N)`.
7. `resuming`: `Plans`: plans of one minibatch after the other, from any position on.
8. `ahead`: Planning ahead: minibatches are planned in a thread while the device computes.
9. `batched`: `Batched`: a function of many instances, made of one of one instance.
10. `batch`: the composition of everything else.
11. `calibrate`: The costs of batches on this machine.
12. `info`: The installation: versions, devices, and whether planning is compiled.
"""
