"""The rivals of jedbatch: the same computations as experts write them.

`by_hand` is JAX and `in_torch` PyTorch for the workloads of `edbatch`, `encoder` the Transformer of
one sentence, and `unrolled` a TreeLSTM unrolled for one minibatch, compared when run as a script.
"""
