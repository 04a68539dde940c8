"""Graphs in, policy out.

Read in this order:

1. `q_learning`: Q-learning on frontiers, in `jax.numpy`.
2. `candidates`: Learning a policy from graphs: teachers, imitation, Q-learning, and a comparison
   of them.
3. `adaptive`: The policy of a batched function that was given none.
"""
