"""`batch` and `Batched`, the composition of everything else; the costs of batches.

Read in this order:

1. `agreement`: Agreement of processes on one program, before devices of several processes
   compute together.
2. `on_devices`: Minibatches over several devices: what `plan`, `apply` and `warm` do with a mesh.
3. `nested`: Results of instances that are recorded inside of another function, or run line by
   line.
4. `calling`: Calls of a batched function: of rows of arrays, inside of another, in rounds, or
   planned.
5. `warming`: `Batched.warm`: what minibatches to come need is compiled ahead of time.
6. `pickling`: Pickling what other processes are sent: functions by name where they have one there.
7. `planner`: `Planner`: minibatches are planned in other processes, and attached here.
8. `processes`: Planning in processes of its own: `Batched.plans(..., workers=N)`.
9. `ahead`: Planning ahead: minibatches are planned in a thread while the device computes.
10. `one_by_one`: Results one by one, on the host, as streams and servers ask a batched function
    for them.
11. `streaming`: Streams: results of any number of instances, one by one, in bounded memory.
12. `lane_counts`: `Batched.lane_steps`: counts of what loops and branches run that values decide
    on.
13. `learning`: `Batched.learn`: a policy learned from the graph of some instances; nothing is
   computed.
14. `batched`: `Batched`: a function of many instances, made of one of one instance.
15. `batch`: the composition of everything else.
16. `calibrate`: The costs of batches on this machine.
17. `cores`: The cores of a CPU as devices of a mesh, one for each shard of a minibatch.
18. `info`: The installation: versions, devices, and whether planning is compiled.
"""
