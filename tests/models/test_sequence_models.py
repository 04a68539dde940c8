"""Taggers and translation."""

import jax
import numpy as np
import pytest
from cases import lstms
from cases.helpers import assert_close, assert_no_recompile
from cases.models import SENTENCES, SPELLED, TRANSLATIONS, random_params
from cases.training import train

import jedbatch
from jedbatch.data import BEGIN, END, synthetic_tagged, synthetic_translations
from jedbatch.models import tagger, translation


def words_of(sentences):
    return [words for words, _ in sentences]


# --- taggers ---


def test_tagger_against_its_equations():
    """Two layers and a spelled word, written out with NumPy in double precision."""
    cells = tagger.flax_cells(6, 3, 4, num_characters=6)
    p = lstms.double(random_params(cells, 1))
    words, tags = (1, (3, 0, 5), 4), [2, 0, 0]

    def both_ways(forward, backward, xs):
        zeros = np.zeros(4), np.zeros(4)
        there = lstms.lstm_states(p[forward], xs, zeros)
        back = lstms.lstm_states(p[backward], xs[::-1], zeros)[::-1]
        return [h for h, _ in there], [h for h, _ in back]

    spelling = [p["character"]["embedding"][c] for c in words[1]]
    there, back = both_ways("spell_forward", "spell_backward", spelling)
    joined = lstms.linear(p["join"]["linear"], np.concatenate([there[-1], back[0]]))
    table = p["embed"]["embedding"]
    first = both_ways("forward1", "backward1", [table[1], joined, table[4]])
    second = both_ways("forward2", "backward2", list(np.concatenate(first, axis=1)))
    hidden = np.tanh(lstms.linear(p["output"]["hidden"], np.concatenate(second, axis=1)))
    logits = lstms.linear(p["output"]["tags"], hidden)

    params = lstms.single(p)
    got = tagger.scorer(cells)(params, (words, tuple(tags)))
    assert_close(got, lstms.score(logits, tags), 1e-5)
    assert_close(tagger.tagger(cells)(params, words), list(logits.astype(np.float32)), 1e-5)


def test_logits_of_sentences_of_all_lengths():
    """Lists of logits; sentences longer and shorter than those before compile nothing."""
    cells = tagger.flax_cells(6, 3, 4, num_layers=1)
    params = random_params(cells)
    tag = tagger.tagger(cells)
    batched = jedbatch.batch(tag, out_axes=None)
    assert_close(
        batched(params, words_of(SENTENCES)),
        [tag(params, words) for words in words_of(SENTENCES)],
        1e-5,
    )
    batched(params, [(1,) * n for n in (9, 3, 30)])
    with assert_no_recompile():
        logits = batched(params, [(1,) * n for n in (7, 20, 12)])
    assert [len(x) for x in logits] == [7, 20, 12]


def test_spelled_words_need_characters():
    cells = tagger.flax_cells(6, 3, 4)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"spelled word \(3, 1, 4\).*`num_characters`"):
        jedbatch.batch(tagger.scorer(cells)).plan(params, SPELLED)


@pytest.mark.slow
def test_tagger_learns():
    """More than the most frequent tag: a name is told by the words beside it."""
    sentences = synthetic_tagged(96, seed=1, num_words=40, num_tags=4, mean_length=8)
    cells = tagger.flax_cells(40, 4, 8, num_layers=1)
    score = jedbatch.batch(tagger.scorer(cells))
    params = random_params(cells)
    trained = train(score, params, sentences, lambda s: len(s[1]), size=8, epochs=12, rate=0.02)
    tags = [tag for _, tags in sentences for tag in tags]
    assert trained.losses[-1] < 0.5 * trained.losses[0]
    assert trained.right[-1] > tags.count(0) / len(tags) + 0.05
    assert trained.compiled == 0


# --- translation ---


def test_translation_against_its_equations():
    """Scored and translated with NumPy in double precision."""
    cells = translation.flax_cells(6, 7, 4)
    p = lstms.double(random_params(cells, 1))
    source, target = TRANSLATIONS[0]
    zeros = np.zeros(4), np.zeros(4)
    encoded = lstms.lstm_states(p["encode"], p["source"]["embedding"][list(source)], zeros)[-1]

    fed = p["target"]["embedding"][[BEGIN, *target[:-1]]]
    hs = np.stack([h for h, _ in lstms.lstm_states(p["decode"], fed, encoded)])
    params = lstms.single(p)
    got = translation.scorer(cells)(params, TRANSLATIONS[0])
    assert_close(got, lstms.score(lstms.linear(p["output"], hs), target), 1e-5)

    state, word, written = encoded, BEGIN, []
    while word != END and len(written) < 5:
        state = lstms.lstm(p["decode"], state, p["target"]["embedding"][word])
        word = int(lstms.linear(p["output"], state[0]).argmax())
        written.append(word)
    assert translation.translator(cells, most=5)(params, source) == written


@pytest.mark.slow
def test_translation_learns_and_translates():
    """After training, sentences end by themselves, at other lengths, and as in the loop."""
    pairs = synthetic_translations(64, seed=1, num_words=8, mean_length=3)
    cells = translation.flax_cells(8, 20, 16)
    score = jedbatch.batch(translation.scorer(cells))
    params = random_params(cells)
    trained = train(score, params, pairs, lambda p: len(p[1]), size=8, epochs=20, rate=0.02)
    assert trained.losses[-1] < 0.5 * trained.losses[0]
    assert trained.compiled == 0

    translate = translation.translator(cells, most=20)
    sources = [source for source, _ in pairs[:8]]
    got = jedbatch.batch(translate, out_axes=None)(trained.params, sources)
    assert got == [translate(trained.params, source) for source in sources]
    assert all(words[-1] == END for words in got)
    assert len({len(words) for words in got}) > 1


def test_translations_end_at_the_latest():
    cells = translation.flax_cells(6, 7, 4)
    params = random_params(cells)
    translate = jedbatch.batch(translation.translator(cells, most=3), out_axes=None)
    for word, expected in ((4, [4, 4, 4]), (END, [END])):
        params["output"]["bias"] = 1e3 * np.eye(7, dtype=np.float32)[word]
        assert translate(params, [(1, 2), (3,)]) == [expected, expected]
