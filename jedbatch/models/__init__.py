"""Models written for one instance, with public names only."""

from jedbatch.models import childsum, tree

__all__ = ["childsum", "tree"]
