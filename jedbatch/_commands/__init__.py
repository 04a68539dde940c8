"""The commands of `python -m jedbatch`, beneath its options.

Read in this order:

1. `lookup`: Finds what the command line names: an attribute of a module.
2. `timing`: Times functions.
3. `pictures`: Draws a plan and saves the pictures.
4. `printing`: Prints numbers and policies.
5. `loop`: The loop over single instances, with its cells compiled by `jax.jit`.
6. `user_function`: A function of the user's, and what it runs on.
7. `user_commands`: `show`, `learn` and `bench` for it.
8. `serving`: `serve`: a function of the user's behind HTTP.
9. `models`: The models of `jedbatch.models`: their plans, policies and rates.
10. `demo`: Trains a TreeLSTM.
"""
