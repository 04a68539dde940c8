/* Hash tables of the fast path of recording (see `memo.h`): open addressing, powers of two. */

#include <stdlib.h>
#include <string.h>

#include "memo.h"

enum { FIRST_WAYS = 64, FIRST_KNOWN = 64 };

int
grow_words(Words *words)
{
    size_t size = 2 * (size_t)words->room * sizeof(uintptr_t);
    int is_first = words->words == words->few;
    uintptr_t *more = realloc(is_first ? NULL : words->words, size);
    if (more == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (is_first)
        memcpy(more, words->few, sizeof words->few);
    words->words = more;
    words->room *= 2;
    return 0;
}

static uint64_t
hash_of(const Words *words)
{
    uint64_t hash = (uint64_t)words->count;
    for (Py_ssize_t i = 0; i < words->count; i++) {
        hash = (hash ^ words->words[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

static Way **
place_of(const Ways *ways, uint64_t hash, const uintptr_t *words, Py_ssize_t count)
{
    for (size_t at = hash & (ways->room - 1);; at = (at + 1) & (ways->room - 1)) {
        const Way *way = ways->slots[at];
        if (way == NULL || (way->hash == hash && way->count == count &&
                            memcmp(way->words, words, count * sizeof *words) == 0))
            return &ways->slots[at];
    }
}

Way *
find_way(Ways *ways, const Words *words)
{
    if (ways->count == 0)
        return NULL;
    uintptr_t place = words->words[0] >> 4;
    Way **latest = &ways->latest[(place + (uintptr_t)words->count) % NUM_LATEST], *way = *latest;
    if (way == NULL || way->count != words->count ||
        memcmp(way->words, words->words, (size_t)words->count * sizeof *words->words) != 0)
        way = *place_of(ways, hash_of(words), words->words, words->count);
    if (way != NULL)
        *latest = way;
    return way;
}

Way *
new_way(const Words *words)
{
    Way *way = calloc(1, sizeof(Way) + (size_t)words->count * sizeof(uintptr_t));
    if (way == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    way->hash = hash_of(words);
    way->count = words->count;
    memcpy(way->words, words->words, (size_t)words->count * sizeof(uintptr_t));
    return way;
}

void
free_way(Way *way)
{
    PyObject *held[] = {way->held, way->call_spec, way->kinds, way->unit, way->made_values};
    free_spare(way);
    free(way);
    for (size_t i = 0; i < sizeof(held) / sizeof(*held); i++)
        Py_XDECREF(held[i]);
}

void
add_spare(Way *way, PyObject *results)
{
    if (way->num_spare == way->room) {
        Py_ssize_t room = way->room ? 2 * way->room : 16;
        PyObject **more = realloc(way->spare, (size_t)room * sizeof(PyObject *));
        if (more == NULL)
            return;
        way->spare = more;
        way->room = room;
    }
    way->spare[way->num_spare++] = Py_NewRef(results);
}

void
free_spare(Way *way)
{
    while (way->num_spare > 0)
        Py_DECREF(way->spare[--way->num_spare]);
    free(way->spare);
    way->spare = NULL;
    way->room = 0;
}

void
free_all_spare(Ways *ways)
{
    for (size_t i = 0; i < ways->room; i++)
        if (ways->slots[i] != NULL)
            free_spare(ways->slots[i]);
}

int
add_way(Ways *ways, Way *way)
{
    if (2 * ways->count >= ways->room) {
        Ways more = *ways;
        more.room = ways->room ? 2 * ways->room : FIRST_WAYS;
        more.slots = calloc(more.room, sizeof(Way *));
        if (more.slots == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (size_t i = 0; i < ways->room; i++) {
            Way *old = ways->slots[i];
            if (old != NULL)
                *place_of(&more, old->hash, old->words, old->count) = old;
        }
        free(ways->slots);
        *ways = more;
    }
    Way **place = place_of(ways, way->hash, way->words, way->count);
    if (*place != NULL) { /* another call has found it meanwhile */
        free_way(way);
        return 0;
    }
    *place = way;
    ways->count++;
    return 0;
}

void
clear_ways(Ways *ways)
{
    Ways old = *ways;
    memset(ways, 0, sizeof *ways);
    for (size_t i = 0; i < old.room; i++)
        if (old.slots[i] != NULL)
            free_way(old.slots[i]);
    free(old.slots);
}

static size_t
slot_of(const KnownObjects *known, PyObject *x)
{
    size_t mask = known->num_slots - 1;
    size_t at = (size_t)(((uint64_t)(uintptr_t)x >> 4) * 0x9E3779B97F4A7C15u >> 24) & mask;
    while (known->slots[at] != 0 && known->items[known->slots[at] - 1].x != x)
        at = (at + 1) & mask;
    return at;
}

Known *
find_known_object(const KnownObjects *known, PyObject *x)
{
    if (known->count == 0)
        return NULL;
    uint32_t number = known->slots[slot_of(known, x)];
    return number == 0 ? NULL : &known->items[number - 1];
}

static int
grow_known(KnownObjects *known)
{
    size_t room = known->room ? 2 * known->room : FIRST_KNOWN;
    Known *items = room > UINT32_MAX / 2 ? NULL : realloc(known->items, room * sizeof(Known));
    if (items == NULL)
        return -1;
    known->items = items;
    uint32_t *slots = calloc(2 * room, sizeof(uint32_t));
    if (slots == NULL)
        return -1;
    free(known->slots);
    known->slots = slots;
    known->num_slots = 2 * room;
    known->room = room;
    for (size_t i = 0; i < known->count; i++)
        known->slots[slot_of(known, known->items[i].x)] = (uint32_t)i + 1;
    return 0;
}

static int
is_plain(PyObject *x)
{
    return PyLong_CheckExact(x) || PyUnicode_CheckExact(x);
}

int
add_known_object(KnownObjects *known, PyObject *x, PyObject *token, PyObject *index,
                 Py_ssize_t width, int is_published)
{
    if (known->count == known->room && grow_known(known) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    size_t at = slot_of(known, x);
    if (known->slots[at] != 0 || !is_plain(token) || (index != NULL && !is_plain(index)))
        return 0;
    known->items[known->count] = (Known){x, Py_NewRef(token), Py_XNewRef(index), width, is_published};
    known->slots[at] = (uint32_t)++known->count;
    return 0;
}

void
clear_known_objects(KnownObjects *known)
{
    if (known->count > 0)
        memset(known->slots, 0, known->num_slots * sizeof(uint32_t));
    while (known->count > 0) { /* numbers and strings, whose release runs no code */
        Known old = known->items[--known->count];
        Py_DECREF(old.token);
        Py_XDECREF(old.index);
    }
    known->num_published = 0;
}

void
free_known_objects(KnownObjects *known)
{
    clear_known_objects(known);
    free(known->items);
    free(known->slots);
    memset(known, 0, sizeof *known);
}
