"""Golden texts: the public signatures, and what is planned for fixed programs and instances.

Each entry of `TEXTS` is the name of a file beside this module and a function that computes its
text. A plan is shown as it prints, without times, followed by one line for each minibatch: nodes,
batches, and for the forward and the reverse half the number of its program and digests of its
tables. What is the same for two versions of this package is the same to the last integer.

Nothing is compiled except by rounds and lazy scopes, which compute values to decide on. Names of
modules occur nowhere, so that definitions can move; nor do annotations, which say the same better
or worse.

    python -m tests.golden            # compare
    python -m tests.golden --write    # take what there is now as right

Rewrite them when a plan is to change, and say in the commit why.
"""

from .plans import PLANS
from .rounds import ROUNDS
from .signatures import signatures

TEXTS = {"signatures": signatures, **PLANS, **ROUNDS}

__all__ = ["TEXTS"]
