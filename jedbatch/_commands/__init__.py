"""The commands of `python -m jedbatch`, beneath its options.

Read in this order:

1. `lookup`: Finds what the command line names: an attribute of a module.
2. `timing`: Times functions.
3. `pictures`: Draws a plan and saves the pictures.
4. `user_function`: A function of the user's, and what it runs on.
5. `user_commands`: `show` and `bench` for it.
6. `serving`: `serve`: a function of the user's behind HTTP.
7. `models`: The models of `jedbatch.models`: their plans, policies and rates.
8. `demo`: Trains a TreeLSTM.
"""
