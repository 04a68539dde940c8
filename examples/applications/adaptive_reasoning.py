"""Adaptive reasoning: a small network refines its answer until a head says that it is done.

As in tiny recursive models, attention and a network of two layers are applied to the question, a
latent state and the answer so far, again and again, at most 32 times. After each step a head says
how much was done, and the question is left when that adds up to one (Graves, 2016). Weights are
random; how hard a question is, is a number that divides what the head says.

    python examples/applications/adaptive_reasoning.py [--quick] [--write]
"""

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

MOST = 32  # steps

# --- one step ---


def norm(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def refine(params, question, difficulty, state):
    """The next latent state and answer, [tokens, hidden], and how much was done, up to 1."""
    latent, answer, done = state
    x = norm(question + latent + answer)
    weights = jax.nn.softmax((x @ params["query"]) @ (x @ params["key"]).T / np.sqrt(x.shape[-1]))
    latent = norm(latent + weights @ (x @ params["value"]))
    latent = norm(latent + jax.nn.gelu(latent @ params["up"]) @ params["down"])
    answer = norm(answer + latent @ params["read"])
    return latent, answer, done + jax.nn.sigmoid(answer.mean(0) @ params["halt"]) / difficulty


# --- one question ---


def reason(params, instance):
    question, difficulty = instance

    def body(carry):
        state, steps = carry
        return refine(params, question, difficulty, state), steps + 1

    goes_on = lambda carry: (carry[0][-1] < 1) & (carry[1] < MOST)
    zeros = jnp.zeros_like(question)
    (_, answer, _), steps = jax.lax.while_loop(goes_on, body, ((zeros, zeros, 0.0), 0))
    return answer.mean(0), steps


# --- all steps for all ---


@jax.jit
def all_steps(params, instances):
    def one(question, difficulty):
        def body(carry, _):
            state, steps = carry
            goes_on = state[-1] < 1
            new = refine(params, question, difficulty, state)
            state = jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), new, state)
            return (state, steps + goes_on), None

        zeros = jnp.zeros_like(question)
        start = (zeros, zeros, 0.0), 0
        ((_, answer, _), steps), _ = jax.lax.scan(body, start, length=MOST)
        return answer.mean(0), steps

    return jax.vmap(one)(*instances)


# --- `vmap` of the loop ---

by_vmap = jax.jit(jax.vmap(reason, (None, 0)))

# --- rebatched by hand ---


@jax.jit
def step_of_all(params, question, difficulty, state):
    return jax.vmap(refine, (None, 0, 0, 0))(params, question, difficulty, state)


@jax.jit
def chosen(arrays, rows):
    return jax.tree.map(lambda x: x[rows], arrays)


def rebatched(params, instances):
    """After each step the host leaves out who is done, once that halves the width."""
    question, difficulty = instances
    count = len(difficulty)
    state = jnp.zeros_like(question), jnp.zeros_like(question), jnp.zeros(count)
    answers, steps = np.zeros((count, question.shape[-1]), np.float32), np.zeros(count, np.int32)
    rows, open_ = np.arange(count), np.ones(count, bool)
    for step in range(1, MOST + 1):
        state = step_of_all(params, question, difficulty, state)
        ends = open_ & ((np.asarray(state[-1]) >= 1) | (step == MOST))
        if ends.any():
            answers[rows[ends]] = np.asarray(state[1])[ends].mean(1)
            steps[rows[ends]] = step
            open_ = open_ & ~ends
        left = np.flatnonzero(open_)
        if not len(left):
            break
        width = 1 << (len(left) - 1).bit_length()
        if width < len(rows):
            keep = np.pad(left, (0, width - len(left)), mode="edge")
            question, difficulty, state = chosen((question, difficulty, state), keep)
            rows, open_ = rows[keep], np.arange(width) < len(left)
    return answers, steps


# --- questions ---


def questions(rng, count, tokens, hidden):
    """Questions, and how hard they are: half take a few steps, some take all."""
    x = rng.normal(size=(count, tokens, hidden)).astype(np.float32)
    return x, np.clip(rng.geometric(0.25, count) / 2, 0.5, MOST).astype(np.float32)


def parameters(rng, hidden):
    shapes = dict.fromkeys(("query", "key", "value", "read"), (hidden, hidden))
    shapes |= {"up": (hidden, 4 * hidden), "down": (4 * hidden, hidden), "halt": (hidden,)}
    draw = lambda shape: rng.normal(size=shape) / np.sqrt(shape[0])
    return {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in shapes.items()}


def make(quick):
    rng = np.random.default_rng(0)
    count, tokens, hidden, many = (9, 3, 4, 2) if quick else (64, 16, 128, 8)
    minibatches = [questions(rng, count, tokens, hidden) for _ in range(measuring.WARM + many)]

    def sides():
        batched = jedbatch.batch(reason)
        for function in (all_steps, by_vmap, step_of_all, chosen):
            function.clear_cache()
        arrays = lambda _, minibatch: minibatch
        return {
            "jedbatch": Side(lambda _, minibatch: list(zip(*minibatch, strict=True)), batched),
            "all steps for all": Side(arrays, all_steps),
            "`vmap` of the loop": Side(arrays, by_vmap),
            "rebatched by hand": Side(arrays, rebatched),
        }

    def loop(params, minibatch):
        results = [reason(params, instance) for instance in zip(*minibatch, strict=True)]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    return Application(parameters(rng, hidden), minibatches, loop, sides)


def illustrate(axis):
    """Steps that questions take."""
    application = make(False)
    steps = [by_vmap(application.params, m)[1] for m in application.minibatches]
    axis.hist(np.concatenate(steps), bins=np.arange(0.5, MOST + 1.5))
    axis.set(xlabel="steps", ylabel="questions")


SHARES = {
    "jedbatch": ["one step", "one question"],
    "all steps for all": ["one step", "all steps for all"],
    "`vmap` of the loop": ["one step", "one question", "`vmap` of the loop"],
    "rebatched by hand": ["one step", "rebatched by hand"],
}

if __name__ == "__main__":
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
