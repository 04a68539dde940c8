"""Planning ahead: minibatches are planned in a thread while the device computes.

Planning is work of the host and running is work of the device, which JAX dispatches and does not
wait for. A thread plans the minibatches to come, in order, and stays a few of them ahead.
"""

import collections
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jedbatch import checks
from jedbatch._program.plan import Plan
from jedbatch._record.thread_settings import ThreadSettings

MAX_AHEAD = 1024
END = object()


def plans(batched: Any, *args: Any, gradient: bool = True, ahead: int = 2) -> Iterator[Plan]:
    """Yields plans for minibatches, made in a thread while others are used.

    The device computes with one plan while the next ones are made, so that a step of training
    takes the longer of both times, not their sum. The thread stops when the iterator is closed, as
    where a `for` loop is left, and sees JAX configured as it is where `plans` is called.

    Args:
      batched: the batched function.
      *args: as for `plan`, with an iterable of minibatches in place of each sequence of instances:
        a list, a generator, a Grain dataset, a `torch.utils.data.DataLoader` with
        `collate_fn=list`. They are read in the thread, `ahead` before they are needed at most.
      gradient: whether `apply` will be differentiated; planning is faster if not.
      ahead: plans made before they are asked for. With 0 they are made when they are, in the
        thread of the caller.

    Returns:
      An iterator of plans for `apply`, in the order of the minibatches.

    Raises:
      TypeError: something is no iterable of minibatches, or what `plan` raises for one of them,
        with a note that says which.
      ValueError: there are more minibatches of one argument than of another, or what `plan` raises.

    Example:
      >>> import jax.numpy as jnp, jedbatch
      >>> total = jedbatch.batch(lambda w, xs: sum(w * x for x in xs))
      >>> minibatches = [[(1.0, 2.0), (3.0,)], [(4.0,), (5.0, 6.0)]]
      >>> [total.apply(2.0, plan).tolist() for plan in total.plans(2.0, minibatches)]
      [[6.0, 6.0], [8.0, 22.0]]
    """
    checks.flag("plans", "gradient", gradient)
    checks.whole("plans", "ahead", ahead, least=0, most=MAX_AHEAD)
    rows = batched._arguments.minibatches(args)
    numbers = itertools.count()

    def make() -> Any:
        number = next(numbers)
        try:
            found: Any = next(rows, END)
            return END if found is END else batched.plan(*found, gradient=gradient)
        except Exception as error:
            error.add_note(f"This happened while minibatch {number} was planned.")
            raise

    return in_thread(make, ahead) if ahead else iter(make, END)


def in_thread(make: Callable[[], Any], ahead: int) -> Iterator[Any]:
    """Yields what a function makes until that is `END`, a few made before they are asked for."""
    settings = ThreadSettings()
    waiting: collections.deque[Future] = collections.deque()
    with ThreadPoolExecutor(1, "jedbatch-plans") as thread:
        try:
            while True:
                while len(waiting) <= ahead:
                    waiting.append(thread.submit(settings.run, make))
                made = waiting.popleft().result()
                if made is END:
                    return
                yield made
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
