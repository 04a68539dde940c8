"""Hierarchical attention (Yang et al., 2016): documents of sentences of words, in one function.

A document is a list of arrays of words, int[length], of any lengths. Attention over the words of a
sentence makes a vector of it, attention over the sentences one of the document; in plain
operations, or the latter in a cell.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks.programs import Program, normal

WORDS = 500
SCORES = 5


def attend(params, name, rows):
    hidden = jnp.tanh(rows @ params[f"{name}_w"])
    weights = jax.nn.softmax(hidden @ params[f"{name}_query"])
    return weights @ hidden


def over_sentences(params, *sentences):
    return attend(params, "sentences", jnp.stack(sentences))


def model(params, document, over_sentences=over_sentences):
    sentences = [attend(params, "words", params["embedding"][words]) for words in document]
    return over_sentences(params, *sentences) @ params["score"]


over_sentences_cell = jedbatch.cell(over_sentences)


def model_with_cell(params, document):
    return model(params, document, over_sentences_cell)


def instances(rng, count, tiny):
    def document():
        lengths = rng.integers(1, 5 if tiny else 31, size=rng.integers(1, 4 if tiny else 13))
        return [rng.integers(WORDS, size=n).astype(np.int32) for n in lengths]

    return [document() for _ in range(count)]


def parameters(key, tiny):
    size = 4 if tiny else 128
    shapes = {
        "embedding": (WORDS, size),
        "words_w": (size, size),
        "words_query": (size,),
        "sentences_w": (size, size),
        "sentences_query": (size,),
        "score": (size, SCORES),
    }
    return jax.tree.map(lambda x: x * size**-0.5, normal(key, shapes))


def prepare(minibatches):
    """(words [documents, sentences, words], 0 or 1 for each word)."""
    all_documents = [document for documents in minibatches for document in documents]
    size = max(map(len, all_documents)), max(len(s) for d in all_documents for s in d)
    made = []
    for documents in minibatches:
        words = np.zeros((2, len(documents), *size), np.int32)
        for i, document in enumerate(documents):
            for j, sentence in enumerate(document):
                words[0, i, j, : len(sentence)] = sentence
                words[1, i, j, : len(sentence)] = 1
        made.append((words[0], words[1]))
    return made


def by_hand(params, documents):
    words, exists = documents

    def attend(name, rows, exists):
        hidden = jnp.tanh(rows @ params[f"{name}_w"])
        scores = jnp.where(exists, hidden @ params[f"{name}_query"], -1e9)
        return jnp.einsum("...n,...nh->...h", jax.nn.softmax(scores), hidden)

    sentences = attend("words", params["embedding"][words], exists > 0)
    return attend("sentences", sentences, exists.any(-1)) @ params["score"]


PROGRAMS = {
    "attention": Program(instances, parameters, model, prepare, by_hand),
    "attention_cell": Program(instances, parameters, model_with_cell, prepare, by_hand),
}
