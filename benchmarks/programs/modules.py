"""Neural module networks (Andreas et al., 2016): each question is a program of modules.

An instance is `(layout, image)`: an image is rows of features, [regions, h]; a layout is one of
`("find", word)`, `("relocate", word, below)`, `("and", left, right)`, `("or", left, right)`,
`("not", below)`, which give attention over regions. What is attended to is described.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks.programs import Program, forest, normal

WORDS = 40
REGIONS = 49
ANSWERS = 10


def find_regions(params, image, word):
    return jax.nn.sigmoid((image @ params["find"]) @ params["words"][word])


def relocate_regions(params, image, attention, word):
    seen = (attention @ image) @ params["relocate_from"]
    return jax.nn.sigmoid((image @ params["relocate"]) @ (seen * params["words"][word]))


@jedbatch.cell
def find(params, image, word):
    return find_regions(params, image, word)


@jedbatch.cell
def relocate(params, image, attention, word):
    return relocate_regions(params, image, attention, word)


@jedbatch.cell
def describe(params, image, attention):
    return jnp.tanh(attention @ image) @ params["answer"]


def attend(params, layout, image):
    match layout:
        case ("find", word):
            return find(params, image, word)
        case ("relocate", word, below):
            return relocate(params, image, attend(params, below, image), word)
        case ("and", left, right):
            return jnp.minimum(attend(params, left, image), attend(params, right, image))
        case ("or", left, right):
            return jnp.maximum(attend(params, left, image), attend(params, right, image))
        case ("not", below):
            return 1 - attend(params, below, image)


def model(params, question):
    layout, image = question
    return describe(params, image, attend(params, layout, image))


def instances(rng, count, tiny):
    def grow(depth):
        draw = rng.random()
        if depth == 0 or draw < 0.2:
            return "find", int(rng.integers(WORDS))
        if draw < 0.45:
            return "relocate", int(rng.integers(WORDS)), grow(depth - 1)
        if draw < 0.85:
            return "and" if draw < 0.65 else "or", grow(depth - 1), grow(depth - 1)
        return "not", grow(depth - 1)

    def image():
        return rng.normal(size=(REGIONS, _size(tiny))).astype(np.float32)

    return [(grow(2 if tiny else 4), image()) for _ in range(count)]


def _size(tiny):
    return 4 if tiny else 64


def parameters(key, tiny):
    size = _size(tiny)
    shapes = {
        "words": (WORDS, size),
        "find": (size, size),
        "relocate": (size, size),
        "relocate_from": (size, size),
        "answer": (size, ANSWERS),
    }
    return jax.tree.map(lambda x: x * size**-0.5, normal(key, shapes))


KINDS = ("relocate", "and", "or", "not")


def prepare(minibatches):
    """(layouts, whose data are pairs (word, image), and images [questions, regions, h])."""

    def read(instance, layout):
        kind, *rest = layout
        word = rest.pop(0) if kind in ("find", "relocate") else 0
        return (0 if kind == "find" else KINDS.index(kind)), (word, instance), rest

    layouts = [[layout for layout, _ in questions] for questions in minibatches]
    images = [np.stack([image for _, image in questions]) for questions in minibatches]
    return list(zip(forest.prepare(layouts, read, len(KINDS)), images, strict=True))


def by_hand(params, questions):
    layouts, images = questions

    def leaf(data):
        words, image = data.T
        return jax.vmap(find_regions, (None, 0, 0))(params, images[image], words)

    def moved(data, below, _):
        words, image = data.T
        return jax.vmap(relocate_regions, (None, 0, 0, 0))(params, images[image], below, words)

    def of_two(operator):
        return lambda _, below, __: operator(below[::2], below[1::2])

    inner = [moved, of_two(jnp.minimum), of_two(jnp.maximum), lambda _, below, __: 1 - below]
    attention = forest.climb(layouts, leaf, inner)
    return jnp.tanh(jnp.einsum("ir,irh->ih", attention, images)) @ params["answer"]


PROGRAMS = {"modules": Program(instances, parameters, model, prepare, by_hand)}
