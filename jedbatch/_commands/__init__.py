"""The commands of `python -m jedbatch`, beneath its options.

Read in this order:

1. `lookup`: Finds what the command line names: an attribute of a module.
2. `loop`: The loop over single instances, with its cells compiled by `jax.jit`.
3. `user_function`: A function of the user's, and what it runs on.
4. `models`: The models of `jedbatch.models`, as functions that run on data of their own.
5. `user_commands`: `show`, `learn` and `bench` for it; `fuzz` and `info`.
6. `serving`: `serve`: a function of the user's behind HTTP.
7. `demo`: Trains a TreeLSTM.
"""
