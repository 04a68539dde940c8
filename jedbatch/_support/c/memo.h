/* What the fast path of recording knows by the addresses of objects (see `fast_path.c`): ways of
 * calls that led to a call spec before, and containers and results that have a token.
 *
 * Nothing here runs Python code but the release of references, which callers do last.
 */

#ifndef JEDBATCH_MEMO_H
#define JEDBATCH_MEMO_H

#include <stdlib.h>

#include "core.h"

/* Numbers, at first in place. */
#define FEW_WORDS 48

typedef struct {
    uintptr_t few[FEW_WORDS], *words;
    Py_ssize_t count, room;
} Words;

static inline void
init_words(Words *words)
{
    words->words = words->few;
    words->count = 0;
    words->room = FEW_WORDS;
}

static inline void
free_words(Words *words)
{
    if (words->words != words->few)
        free(words->words);
    init_words(words);
}

int grow_words(Words *words); /* -1 with an error without memory */

static inline int
push_word(Words *words, uintptr_t word) /* the same */
{
    if (words->count == words->room && grow_words(words) < 0)
        return -1;
    words->words[words->count++] = word;
    return 0;
}

/* A way of calls: the words that tell it from others, and the call spec it leads to. `held` keeps
 * alive what words are the addresses of. */
typedef struct {
    uint64_t hash;
    Py_ssize_t count;
    PyObject *held, *call_spec, *kinds, *unit;
    PyObject *made_values; /* the operands that are made first, as in `CallSpec` */
    int64_t id;
    Py_ssize_t num_results;
    int is_single, is_flat; /* an array; a flat tuple */
    PyObject **spare; /* results of an instance before that nobody has, to be used again */
    Py_ssize_t num_spare, room;
    uintptr_t words[];
} Way;

#define NUM_LATEST 16

typedef struct {
    Way **slots;
    size_t count, room;
    Way *latest[NUM_LATEST]; /* found last, by where their words begin and how many they are */
} Ways;

Way *find_way(Ways *ways, const Words *words);
Way *new_way(const Words *words); /* NULL with an error without memory */
int add_way(Ways *ways, Way *way); /* takes it over, unless it fails: -1 without memory */
void free_way(Way *way);
void add_spare(Way *way, PyObject *results); /* does nothing without memory */
void free_spare(Way *way);
void free_all_spare(Ways *ways);
void clear_ways(Ways *ways);

/* An object that has a token: what it is referred to by, if it is, and whether Python knows. */
typedef struct {
    PyObject *x, *token, *index; /* `x` is borrowed: others keep it */
    Py_ssize_t width;            /* of how many values from `index` on it consists */
    int is_published;
} Known;

typedef struct {
    Known *items;
    size_t count, room;
    uint32_t *slots; /* 1 + the number of an item, by address */
    size_t num_slots, num_published; /* the items before that one are published */
} KnownObjects;

Known *find_known_object(const KnownObjects *known, PyObject *x);
/* Adds one that is not there yet, if its token and index, which may be NULL, are numbers and
 * strings; -1 with an error without memory. */
int add_known_object(KnownObjects *known, PyObject *x, PyObject *token, PyObject *index,
                     Py_ssize_t width, int is_published);
void clear_known_objects(KnownObjects *known);
void free_known_objects(KnownObjects *known);

#endif
