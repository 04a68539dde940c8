"""Errors that stand for an idea, each with a page of help: `help(jedbatch.errors.X)`.

Everything else that is misused raises `ValueError` or `TypeError` where it enters.
"""


class SymbolicValueError(TypeError):
    """Python needed the value of something that has not been computed, where it cannot be had.

    **Symptom.** `if`, `while`, `bool()`, `int()`, `float()`, `range()`, `.item()`,
    `numpy.asarray` or indexing a list met a symbolic value.

    **Where it works.** In a plain call of a batched function, and under `jax.grad`. The instance
    waits; what all instances wait for is computed in batches; they go on:

        def refine(params, x):
            while error(params, x) > 1e-3:      # as often as this instance needs
                x = improve(params, x)
            return x

        refine_all = jedbatch.batch(refine)
        refine_all(params, xs)                  # works
        jax.grad(lambda p: refine_all(p, xs).sum())(params)     # works
        print(refine_all.last_rounds)           # what ran between decisions

    When a function decides for the first time, the call starts over, so that what it does besides
    computing, such as printing, may happen twice.

    **Reason.** Elsewhere values do not exist yet, or would not be the same again:

    - In `plan`, and so with `apply`: which branches are taken depends on the values of the
      parameters, and a plan would be wrong for the next ones. In `Batched.learn` likewise.
    - Under `jax.jit`, `jax.vmap`, `jax.checkpoint` or a second derivative around the batched
      function, with arguments they trace: there are no values there, only tracers of JAX. A lazy
      scope has them in derivatives of any order.
    - Under `jax.grad`, where a value that depends on what is differentiated would become a number
      or an array of NumPy: by `float()`, `complex()`, `.item()`, `.tolist()`, `numpy.asarray` or
      functions of `numpy` and `math`. It would come back as a constant, with a gradient of 0. The
      message names the line and, if there is one, the function of `jax.numpy` to write. `if`,
      `while`, `int()` and indices decide there as elsewhere.
    - Inside of a block that changes the state of the thread, such as
      `with jax.default_matmul_precision(...)` or a module of Flax that is being applied: other
      instances go on while this one waits, and the state would hold for them too. Decide between
      calls of modules.
    - Inside a cell, where JAX's own `ConcretizationTypeError` says so: a cell is one program for
      all its calls.

    **Cure.** Call the batched function, and jit-compile what is around it. Or decide on what is
    known: Python numbers, strings, shapes and the structure of the instance reach the function as
    they are. Or choose between values with `jnp.where`, which computes both, or decide inside a
    cell with `jax.lax.cond` and `jax.lax.while_loop`:

        # instead of                     write
        if score > 0:                    h = jnp.where(score > 0, a(h), b(h))
            h = a(h)
        else:
            h = b(h)

        # and, in a cell, for the loop above
        goes_on = lambda x: error(params, x) > 1e-3
        return jax.lax.while_loop(goes_on, lambda x: improve(params, x), x)

    The loop in the cell is decided on the device, and the function is planned like others. In
    Python, each time that instances wait costs the host some tenths of a millisecond, and a small
    program on the device.
    """


class EscapedValueError(RuntimeError):
    """A symbolic value was used after the function that made it had been recorded.

    **Symptom.** An operation outside the batched function met a symbolic value, or a cell kept
    a traced value. Or a future is used whose lazy scope was left by an exception.

    **Reason.** Symbolic values live while one function is recorded. They got out through a
    global, an attribute, or a list outside the function. Futures outlive their scope as the
    values they stand for, unless these have not been computed.

    **Cure.** Return the value from the batched function, or from the cell. What they compute
    cannot be collected on the side: they are recorded once and run many times.

        kept = []
        def model(params, x):
            h = layer(params, x)
            kept.append(h)      # h leaves through the list: return it instead
            return h

    A function with a derivative rule, `jax.custom_vjp` or `jax.custom_jvp`, holds no values of the
    instance, cell, loop or branch that it is made in: JAX runs its rules later. It gets them as
    arguments, whose gradient may be None:

        @jax.custom_vjp
        def clipped(y, bound): return y
        clipped.defvjp(lambda y, bound: (y, bound),
                       lambda bound, slope: (jnp.clip(slope, -bound, bound), None))
    """


class UnfinishedLoopError(RuntimeError):
    """A loop was to take more steps than `max_steps` of `jedbatch.batch` allows.

    **Symptom.** A call of a batched function stops with the cell that the loop is in and the
    instances in which it did not end; `error.instances` has their numbers, in order.

    **Reason.** `jedbatch.batch(fn, max_steps=n)` bounds every `jax.lax.while_loop`, and every
    `fori_loop` whose length is a value: after n steps a loop stops, whatever its condition says,
    so that one instance that never ends does not hold up all others for ever. Functions in which
    Python decides on values stop when an instance has waited for values n times.

    **Where nothing is raised.** In programs that JAX traces nothing can be raised: under
    `jax.jit`, in derivatives, and where a minibatch is cut over devices. There, real numbers that
    come of a loop which was stopped are NaN, whole numbers and flags are those of its last step,
    and all other instances are as ever. The gradients are NaN then, too: look for it where a loss
    is looked at, or call the function once outside of `jax.jit` to be told the instances.

    **Cure.** If the loop would end, give a larger `max_steps`. If not, decide in the loop what to
    do about it, and return whether it has converged:

        def body(state): ...
        def goes_on(state):
            return (state.error > 1e-6) & (state.step < 1000)
    """

    def __init__(self, message: str, instances: tuple[int, ...] = ()):
        """Makes an error that names some instances.

        Args:
          message: says what happened.
          instances: the numbers of the instances, in order.
        """
        super().__init__(message)
        self.instances = instances

    def __reduce__(self) -> tuple:
        """Returns how the error is sent to another process, with the instances."""
        return type(self), (str(self), self.instances)


class NothingReadyError(ValueError):
    """A policy chose a type that has no ready node.

    **Symptom.** Scheduling stops with what the policy returned and the types that had ready
    nodes.

    **Reason.** A policy is called with a `Frontier` and must return the id of a type with
    `frontier.num_ready[t] > 0`. A policy that computes a score sometimes produces NaN (0/0 when
    a type is exhausted), and `numpy.argmax` of an array with NaN picks the NaN.

    **Cure.** Choose among `frontier.ready_types` only:

        def most_ready(frontier):
            return max(frontier.ready_types, key=lambda t: frontier.num_ready[t])
    """


class PerformanceWarning(UserWarning):
    """Something is right, and much slower than it need be.

    **Symptom.** A warning of one of the classes derived from this one, a class for each cause,
    before anything is compiled.

    **Reason.** Theirs: `help(jedbatch.errors.ManyTypesWarning)` and so on.

    **Cure.** Theirs. In tests, make errors of all of them:

        warnings.simplefilter("error", jedbatch.errors.PerformanceWarning)
    """


class RecompilationWarning(PerformanceWarning):
    """Something makes new node types again and again, and each is compiled by itself.

    **Symptom.** A cell, a jit-ted function or an array that the function closes over is another
    one at every call, so no two nodes agree in type.

    **Reason.** A cell or jit-ted function is told apart by its code and by what it closes over.
    One made inside the batched function is the same at every call only if it closes over the
    same things. A concrete `jax.Array` that the function closes over counts as a weight.

    **Cure.** Pass what changes as a positional argument of the cell, and arrays that belong to
    an instance as part of the instance.
    """


class ManyTypesWarning(PerformanceWarning):
    """A minibatch has many node types, most of which have few nodes.

    **Symptom.** Compiling takes long, and a run does little at a time. A printed plan has a line
    for every type, with few nodes each.

    **Reason.** Nodes run together if they are of one type: the same operation, with operands of
    the same shapes, on the same weights. Types multiply where instances differ in the shapes of
    arrays, in the number of operands of an operation (`jnp.concatenate` of a Python list), or in
    what operations close over. Cells that take lists share types whatever their lengths, if all
    that differs are numbers that are polynomials of the length, and each operation has a rule for
    elements that do not exist; so do operations on `jnp.stack` of a list, and on rows or vectors
    put together by `jnp.concatenate`, until no axis is as long as the list.

    **Cure.** Put what is done with a list into a cell that takes the list. Pass what differs as an
    array that belongs to the instance, or as a positional argument of a cell. Fold lists by a cell
    of two operands. Pad to a few shapes:

        # instead of                          write
        jnp.concatenate(children)[-1]         children[-1][-1]
    """


class GroupedByShapesWarning(PerformanceWarning):
    """Instances whose arrays differ in length are not batched with each other.

    **Symptom.** As of `ManyTypesWarning`, or a minibatch has arrays of eight lengths or more, or
    three minibatches in a row are compiled anew; a printed plan says "grouped by equal shapes", or
    of padded nodes "none for some arrays".

    **Reason.** Arrays of different lengths run together if every operation on them is known to
    work row by row, or for rows of one instance together. The message names one that is not, or
    the place where Python asks for a length in a cell or a jit-ted function. Where what is done to
    arrays depends on the structure of the instance, as where they are the states of a tree, they
    must be as long as arrays of the instance; if they are as long as several of these put end to
    end, or are tables [n, m], each structure is compiled by itself.

    **Cure.** Write `x.shape[0]` in place of `len(x)`, which Python makes a number, put what needs a
    fixed length into a cell, or pad arrays to a few lengths. Some functions of JAX make a number of
    a length:
    for `lax.associative_scan` write `lax.cumsum` and its like, or `lax.scan`; for
    `jnp.searchsorted` and `jnp.digitize` count, `(table < x[:, None]).sum(1)`.
    """


class GrowingTypesWarning(PerformanceWarning):
    """Minibatch after minibatch has node types that none before had.

    **Symptom.** Compiling never stops.

    **Reason.** Instances differ in something that makes types, each time in a new way; see
    `ManyTypesWarning`. Where Python decides on values, so do lists that get longer in a loop, such
    as the keys and values of a decoder: they have types for each length, in cells, too.

    **Cure.** As there; and an array with room for all elements in place of a list, of which those
    that are not there are masked.
    """


class PlannedHereWarning(PerformanceWarning):
    """Most minibatches come back from other processes as they were, and are planned here.

    **Symptom.** `plans(..., workers=N)`, or a loader of data with a planner, is as slow as without.

    **Reason.** The message has it. Another process plans what fits a program that was known when
    the minibatch was sent there. Where each minibatch has node types that none before had, none
    does; see `GrowingTypesWarning`. Nor does it plan where the function, imported anew, computes
    something else: a script may have changed what it reads.

    **Cure.** Give the planner a sample with all that occurs, or call `Batched.warm` with one
    before. Set at the top level of a module what the function reads besides its arguments.
    """


class NoCellsWarning(PerformanceWarning):
    """Many operations outside of cells are recorded one by one.

    **Symptom.** Planning takes longer than running, for minibatches that were never met before.

    **Reason.** Operations that always run together are found and merged, so that a minibatch runs
    as it would with cells. But of an instance that is new each operation passes through JAX, at
    ten to thirty microseconds, and functions such as `jnp.einsum` at hundreds, where a call of a
    cell takes one. Instances met before cost nothing. The message says how many operations there
    were, and what they took. So do operations on shared arguments alone, which are computed once
    for all instances.

    **Cure.** Mark what is done for one node as a cell. The message names the functions in which
    most operations are performed: those called by a function that recurs or loops, to be marked as
    they are, or that function itself, where what it does for one node is to be a function of its
    own. Operations that instances choose one by one, as in expressions, are called as cells:
    `jedbatch.cell(jnp.add)`. Where planning does not matter, as with few instances that come
    again, choose `jedbatch.batch(fn, granularity="auto")`, which does not warn. What depends on
    shared arguments alone is computed before and passed as one.

        # instead of                          write
        def node(params, left, right):        @jedbatch.cell
            ...                               def node(params, left, right): ...
    """


class SlowCallsWarning(PerformanceWarning):
    """Calls of a cell are looked into each time, or functions are called through `jax.jit`.

    **Symptom.** Planning minibatches that were never met before takes longer than running them. A
    printed plan says how many calls were recorded slowly.

    **Reason.** A call is recorded at once if its arguments and what its function closes over show
    that it is like an earlier one. The message says what does not: an array of NumPy, or an object
    with state that is not to be seen, that a cell closes over, or arguments that JAX does not know
    as a pytree. A function under `jax.jit` is one node, but each call of it passes through JAX,
    which takes sixty times as long as a call of a cell. Numbers that a cell closes over and that
    differ from call to call are operands; such calls are counted, and there is no warning.

    **Cure.** Write `@jedbatch.cell` above `@jax.jit`. Pass to the cell what it reads:

        # instead of                              write
        def encode(params, tree):                 @jedbatch.cell
            scales = np.array(tree.scales)        def node(params, scales, left, right): ...
            @jedbatch.cell
            def node(left, right): ...            node(params, np.array(tree.scales), left, right)
    """


__all__ = [
    "EscapedValueError",
    "GroupedByShapesWarning",
    "GrowingTypesWarning",
    "ManyTypesWarning",
    "NoCellsWarning",
    "NothingReadyError",
    "PerformanceWarning",
    "PlannedHereWarning",
    "RecompilationWarning",
    "SlowCallsWarning",
    "SymbolicValueError",
    "UnfinishedLoopError",
]
