"""A table of programs that decide on computed values with ordinary Python.

Each entry makes `(fn, params, instances)` for a number of instances and a seed, as in `programs`.
All of them run as they stand, and so does `jax.grad` of them: of what has a gradient, `float()`
and its like want `jax.lax.stop_gradient` there.
"""

import jax
import jax.numpy as jnp
import numpy as np
from cases.programs import WORDS, H, leaf, node, out, tree_params, trees, weights

import jedbatch

cell = jedbatch.cell
still = jax.lax.stop_gradient
embed, compose, classify = cell(leaf), cell(node), cell(out)
END = 0  # the token that ends a sentence


@cell
def affine(w, v):
    """One layer; the weights are the first argument, so that they may differ."""
    return jnp.tanh(w @ v)


# --- trees ---


def pruned_tree(num, seed):
    """Top-down through a tree; below what scores badly nothing is computed."""

    @cell
    def descend(params, h, side):
        h = jnp.tanh(h @ params["down"][side] + params["b"])
        return h, h @ params["judge"]

    def fn(params, tree):
        visited = 0

        def visit(t, h, score):
            nonlocal visited
            visited += 1
            if score < -0.6:
                return h
            if not isinstance(t, tuple):
                return embed(params, t)
            children = [visit(x, *descend(params, h, side)) for side, x in enumerate(t)]
            return compose(params, *children)

        root = visit(tree, params["b"], 1.0)
        return classify(params, root), visited

    params = tree_params(seed) | weights(seed + 1, down=(2, H, H), judge=(H,))
    return fn, params, trees(num, seed, 12)


def data_dependent_recursion(num, seed):
    """Recursion that ends where a vector has become small; work is done on the way back."""
    shrink = cell(lambda params, h: 0.7 * jnp.tanh(h + 0.1 * params["b"]))
    join = cell(lambda params, h, below: jnp.sin(params["W"] @ h) + below)

    def fn(params, x):
        def visit(h):
            if jnp.abs(h).max() < 0.15:
                return h, 0
            below, depth = visit(shrink(params, h))
            return join(params, h, below), depth + 1

        return visit(x)

    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-1.2, 0.6, num)
    instances = [(s * rng.normal(size=H)).astype(np.float32) for s in scales]
    return fn, weights(seed, W=(H, H), b=(H,)), instances


# --- loops ---


def adaptive_depth(num, seed):
    """A layer repeated until enough halting probability has come together (Graves, 2016)."""
    layer = cell(lambda params, h, x: jnp.tanh(h @ params["W"] + x))
    halting = cell(lambda params, h, x: jax.nn.sigmoid(h @ params["halt"] + x[0]))

    def fn(params, x):
        h, halt, n, total = x, 0.0, 0, jnp.zeros(H)
        while halt < 0.99 and n < 12:
            h = layer(params, h, x)
            p = halting(params, h, x)
            if halt + p > 0.99:
                p = 1 - halt
            total = total + p * h
            halt = halt + p
            n += 1
        return total, n

    rng = np.random.default_rng(seed)
    instances = rng.normal(size=(num, H)).astype(np.float32)
    instances[:, 0] = rng.uniform(-4, 1, num)  # how soon it halts
    return fn, weights(seed, W=(H, H), halt=(H,)), list(instances)


def translation_cells():
    """Cells that read a word, and that tell how likely each next one is."""

    @cell
    def gru(params, h, x):
        z, r = jnp.split(jax.nn.sigmoid(jnp.concatenate([h, x]) @ params["gates"]), 2)
        new = jnp.tanh(jnp.concatenate([r * h, x]) @ params["new"])
        return z * h + (1 - z) * new

    @cell
    def write(params, h, haste):
        scores = h @ params["scores"]
        return jax.nn.log_softmax(scores.at[END].add(haste))

    return gru, write


def encoded(gru, params, source):
    """The state after all words of a sentence."""
    h = jnp.zeros(H)
    for word in source:
        h = gru(params, h, params["E"][word])
    return h


def sources(num, seed):
    """(parameters, sentences with the lengths at which their translations make haste to end)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, num).tolist()
    instances = [(tuple(rng.integers(1, WORDS, n).tolist()), int(rng.integers(8))) for n in lengths]
    shapes = {"E": (WORDS, H), "gates": (2 * H, 2 * H), "new": (2 * H, H), "scores": (H, WORDS)}
    return weights(seed, **shapes), instances


def greedy_decoding(num, seed):
    """An encoder and a decoder that writes words until one of them ends the sentence."""
    gru, write = translation_cells()

    def fn(params, instance):
        source, length = instance
        h = encoded(gru, params, source)
        token, total, written = 1, 0.0, 0
        while token != END and written < 9:
            h = gru(params, h, params["E"][token])
            scores = write(params, h, 1.5 * (written - length))
            token = int(jnp.argmax(scores))
            total = total + scores[token]
            written += 1
        return total, written

    return fn, *sources(num, seed)


def beam_decoding(num, seed):
    """The same with a beam: in each step the two best translations so far are gone on with."""
    gru, write = translation_cells()

    def fn(params, instance):
        source, length = instance
        h = encoded(gru, params, source)
        beam = [(0.0, (1,), h)]
        while any(words[-1] != END for _, words, _ in beam) and len(beam[0][1]) < 7:
            found = []
            for total, words, h in beam:
                if words[-1] == END:
                    found.append((total, words, h))
                    continue
                state = gru(params, h, params["E"][words[-1]])
                scores = write(params, state, 1.5 * (len(words) - 1 - length))
                best, tokens = jax.lax.top_k(scores, 2)
                found += [(total + best[k], (*words, int(tokens[k])), state) for k in range(2)]
            beam = sorted(found, key=lambda x: -float(jax.lax.stop_gradient(x[0])))[:2]
        return beam[0][0], len(beam[0][1])

    return fn, *sources(num, seed)


def newton(num, seed):
    """A damped Newton iteration that ends when the residual is small."""

    def residual(params, y, x):
        return y + 0.5 * jnp.tanh(params["W"] @ y) - x

    @cell
    def iterate(params, y, x, rate):
        slope = jax.jacfwd(lambda y: residual(params, y, x))(y)
        y = y - rate * jnp.linalg.solve(slope, residual(params, y, x))
        return y, jnp.abs(residual(params, y, x)).max()

    def fn(params, instance):
        x, rate = instance
        y, error, n = x, 1.0, 0
        while error > 1e-3 and n < 20:
            y, error = iterate(params, y, x, rate)
            n += 1
        return y, n

    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.3, 1.0, num).tolist()
    instances = [(rng.normal(size=3).astype(np.float32), rate) for rate in rates]
    return fn, weights(seed, W=(3, 3)), instances


# --- sampling ---


def no_u_turn(num, seed):
    """One step of the No-U-Turn Sampler (Hoffman and Gelman, 2014, algorithm 3).

    All random numbers come with the instance.
    """

    def log_density(params, q):
        return -0.5 * jnp.square(q * params["scale"]).sum() - jnp.tanh(q @ params["w"])

    @cell
    def leapfrog(params, q, p, step):
        force = jax.grad(log_density, argnums=1)
        p = p + 0.5 * step * force(params, q)
        q = q + step * p
        p = p + 0.5 * step * force(params, q)
        return q, p, log_density(params, q) - 0.5 * p @ p

    @cell
    def goes_on(q_left, p_left, q_right, p_right):
        span = q_right - q_left
        return (span @ p_left >= 0) & (span @ p_right >= 0)

    def fn(params, instance):
        q, p, step, slices, directions, uniform = instance
        drawn = 0

        def chance():
            nonlocal drawn
            drawn += 1
            return uniform[drawn - 1]

        def build(q, p, direction, depth):
            if depth == 0:
                q, p, joint = leapfrog(params, q, p, step * direction)
                inside = bool(slices <= joint)
                return (q, p), (q, p), q, int(inside), bool(joint > slices - 1000)
            left, right, kept, count, fine = build(q, p, direction, depth - 1)
            if not fine:
                return left, right, kept, count, fine
            if direction < 0:
                left, _, other, more, fine = build(*left, direction, depth - 1)
            else:
                _, right, other, more, fine = build(*right, direction, depth - 1)
            if more and chance() * (count + more) < more:
                kept = other
            return left, right, kept, count + more, fine and bool(goes_on(*left, *right))

        left = right = q, p
        kept, count, depth, fine = q, 1, 0, True
        while fine and depth < 4:
            if directions[depth] < 0:
                left, _, other, more, fine = build(*left, -1, depth)
            else:
                _, right, other, more, fine = build(*right, 1, depth)
            if fine and chance() * count < more:
                kept = other
            count += more
            fine = fine and bool(goes_on(*left, *right))
            depth += 1
        return kept, log_density(params, kept), count, depth

    rng = np.random.default_rng(seed)
    params = weights(seed, scale=(3,), w=(3,))
    params["scale"] = 0.6 + jnp.abs(params["scale"])

    def instance():
        q, p = rng.normal(size=(2, 3)).astype(np.float32)
        joint = log_density(params, q) - 0.5 * p @ p
        slices = np.float32(joint + np.log(rng.uniform(0.05, 1)))
        directions = tuple(rng.choice([-1, 1], 4).tolist())
        step = float(rng.choice([0.15, 0.3, 0.6, 1.2, 2.0]))
        return q, p, step, slices, directions, rng.uniform(size=40).astype(np.float32)

    return fn, params, [instance() for _ in range(num)]


# --- what may be read, and how ---


def mixture_of_experts(num, seed):
    """Python lists of weights and of functions, indexed by what was computed."""
    experts = (jnp.sin, jnp.tanh, lambda v: 0.5 * v)
    functions = [cell(f, name=f"expert_{i}") for i, f in enumerate(experts)]

    def fn(params, instance):
        h, layers = instance
        taken = []
        for i in range(layers):
            expert = params["experts"][jnp.argmax(params["route"][i] @ (3 * h))]
            h = affine(expert["w"], h) + expert["b"]
            act = functions[jnp.argmax(jnp.abs(h[:3]))]
            taken.append(functions.index(act))
            h = act(h)
        return h, sum(taken)

    rng = np.random.default_rng(seed)
    params = weights(seed, route=(3, 4, H))
    params["experts"] = [weights(seed + i, w=(H, H), b=(H,)) for i in range(1, 5)]
    return fn, params, [(rng.normal(size=H).astype(np.float32), i % 4) for i in range(num)]


def values_of_params(num, seed):
    """Values that depend on shared arguments only."""
    gate = cell(lambda params: params["b"].sum() > 0)

    def fn(params, n):
        h = params["b"]
        if params["b"][0] > 0:
            h = affine(params["W"], h)
        for _ in range(n):
            h = affine(params["W"], h) if gate(params) else jnp.sin(h)
        if (params["W"] @ params["b"]).max() > 0.2:
            h = h + params["b"]
        return h

    return fn, weights(seed, W=(H, H), b=(H,)), [i % 4 for i in range(num)]


def values_of_inputs(num, seed):
    """Values that come with the instance: nothing has to be computed for them."""

    def fn(params, instance):
        x, tokens, flag = instance
        h = params["b"]
        if x[0] > 0:
            h = affine(params["V"], x)
        for i in range(tokens.shape[0]):
            if int(tokens[i]) % 2:
                h = compose(params, h, embed(params, int(tokens[i])))
        while flag > 0:
            h, flag = jnp.sin(h), flag - 1
        return h, int(tokens.sum())

    rng = np.random.default_rng(seed)

    def instance():
        x = rng.normal(size=H).astype(np.float32)
        tokens = rng.integers(0, WORDS, int(rng.integers(1, 5))).astype(np.int32)
        return x, tokens, int(rng.integers(3))

    return fn, tree_params(seed) | weights(seed, V=(H, H)), [instance() for _ in range(num)]


def read_twice(num, seed):
    """The same value read again, by other means, and after more was computed."""

    def fn(params, n):
        h, times = params["b"], 0
        for i in range(n):
            h = affine(params["W"], h * (i + 1))
            score = still(h.sum())
            if score > 0:
                times += 1
            after = affine(params["W"], h)
            if score > 0 and not score < 0:
                times += 1
            h = after * float(score)
            assert score.item() == float(score)
        return h, times

    return fn, weights(seed, W=(H, H), b=(H,)), [1 + i % 5 for i in range(num)]


def read_at_the_end(num, seed):
    """Only the sign of a result that is complete depends on a value; some read nothing."""

    def fn(params, n):
        h = params["b"]
        for _ in range(n):
            h = affine(params["W"], h)
        if n == 0:
            return h
        return h if h.sum() > 0 else -h

    return fn, weights(seed, W=(H, H), b=(H,)), [i % 5 for i in range(num)]


def all_ways_to_read(num, seed):
    """`bool`, `int`, `float`, `.item()`, `.tolist()`, `numpy.asarray`, `range`, formatting."""

    def fn(params, n):
        h = affine(params["W"], params["b"] + n)
        fixed = still(h)
        total = h * float(fixed[0]) + fixed[1].item() + sum(fixed.tolist())
        total = total + np.asarray(fixed)
        for _ in range(jnp.argmax(fixed)):
            total = affine(params["W"], total)
        label = f"{int(jnp.argmin(fixed))}"
        if bool((fixed > 2).any()) or not (fixed < 2).all():
            total = -total
        return total, int(label), complex(fixed[2]).real > 0

    return fn, weights(seed, W=(H, H), b=(H,)), [i % 6 - 3 for i in range(num)]


def shift_reduce(num, seed):
    """A parser that decides by what it has composed whether to shift or to reduce.

    SPINN (Bowman et al., 2016) with decisions of its own; DyNet's batching ended here (#1407).
    """
    judge = cell(lambda params, top, second: (top - second) @ params["judge"])

    def fn(params, sentence):
        buffer = [embed(params, word) for word in reversed(sentence)]
        stack, reduced = [buffer.pop()], 0
        while buffer or len(stack) > 1:
            reduce = not buffer
            if buffer and len(stack) > 1:
                reduce = judge(params, stack[-1], stack[-2]) > 0
            if reduce:
                right, left = stack.pop(), stack.pop()
                stack.append(compose(params, left, right))
                reduced += len(buffer)
            else:
                stack.append(buffer.pop())
        return classify(params, stack[0]), reduced

    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, num).tolist()
    sentences = [tuple(rng.integers(WORDS, size=n).tolist()) for n in lengths]
    return fn, tree_params(seed) | weights(seed + 1, judge=(H,)), sentences


def mixed_with_none(num, seed):
    """Some instances read values, some do not, some do no work at all."""

    def fn(params, instance):
        kind, tree, x = instance
        if kind == 0:
            return params["b"]

        def visit(t):
            if isinstance(t, tuple):
                return compose(params, visit(t[0]), visit(t[1]))
            return embed(params, t)

        h = visit(tree)
        while kind == 2 and h.sum() < 1.0:
            h = h + 0.1 * x + 0.1
        return h

    sizes = np.abs(np.random.default_rng(seed).normal(size=num)).tolist()
    instances = [
        (i % 3, t, x) for i, (t, x) in enumerate(zip(trees(num, seed), sizes, strict=True))
    ]
    return fn, tree_params(seed), instances


VALUES = [
    pruned_tree,
    data_dependent_recursion,
    adaptive_depth,
    greedy_decoding,
    beam_decoding,
    newton,
    no_u_turn,
    mixture_of_experts,
    values_of_params,
    values_of_inputs,
    read_twice,
    read_at_the_end,
    all_ways_to_read,
    shift_reduce,
    mixed_with_none,
]
