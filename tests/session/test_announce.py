"""The log names programs that take long to compile, and is silent otherwise."""

import itertools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._support import announce

XS = np.ones((2, 2), np.float32)


def encode(w, x):
    return jnp.tanh(w * x)


@pytest.fixture
def impatient(monkeypatch, caplog):
    monkeypatch.setattr(announce, "PATIENCE", 0.0)
    caplog.set_level(logging.WARNING, "jedbatch")
    return caplog


def test_a_program_that_is_being_compiled_is_announced_once(impatient):
    batched = jedbatch.batch(encode)
    for _ in range(2):
        batched(jnp.ones(2), XS)
    jax.grad(lambda w: batched(w, XS).sum())(jnp.ones(2))
    texts = [r.message for r in impatient.records]
    kinds = ("inference", "training", "reverse")
    assert [t for t in texts if "inference" in t] == [
        "jedbatch is compiling a program for inference: 2 node types in 2 widths"
    ]
    assert [sum(f"for {kind}" in t for t in texts) for kind in kinds] == [1, 1, 1]


def test_nothing_is_said_of_what_is_quick(caplog):
    before = threading.active_count()
    jedbatch.batch(encode)(jnp.ones(2), XS)
    assert not caplog.records
    assert threading.active_count() <= before + 1  # a timer that is just ending


def test_what_helps_is_said_once(monkeypatch, impatient):
    monkeypatch.setattr(announce, "LONG", 0.0)
    monkeypatch.setattr(announce, "_advised", itertools.count())
    for _ in range(2):
        announce.announced(lambda: announce.announce("compiling something"))()
    (advice,) = [r.message for r in impatient.records if "JAX_COMPILATION_CACHE_DIR" in r.message]
    assert advice.startswith("jedbatch took 0 s for compiling something, most of them in XLA.")


def test_an_error_ends_what_was_announced(impatient):
    def fails():
        announce.announce("failing")
        raise ZeroDivisionError

    before = list(announce._waiting.timers)
    with pytest.raises(ZeroDivisionError):
        announce.announced(fails)()
    assert announce._waiting.timers == before
