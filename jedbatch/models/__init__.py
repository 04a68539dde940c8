"""Models written for one instance, with public names only."""

from jedbatch.models import tree

__all__ = ["tree"]
