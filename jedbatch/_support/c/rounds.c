/* What a round is known by: the twin of parts of `_control_flow/recorded.py`, which says what it is.
 */

#include <stdlib.h>
#include <string.h>

#include "ints.h"

enum { CALLS, REFERENCES, GROUPS, TURNS, NUM_COLUMNS };

/* Writes the ranks of the owners of turns, unless they ascend; returns how many it wrote, or -1
 * with an error without memory. */
static Py_ssize_t
write_ranks(const int64_t *owners, Py_ssize_t num_turns, int64_t *ranks)
{
    int ascend = 1;
    for (Py_ssize_t i = 1; ascend && i < num_turns; i++)
        ascend = owners[i] > owners[i - 1];
    if (ascend)
        return 0;
    int64_t least = owners[0], most = owners[0];
    for (Py_ssize_t i = 1; i < num_turns; i++) {
        least = owners[i] < least ? owners[i] : least;
        most = owners[i] > most ? owners[i] : most;
    }
    int64_t *rank = calloc((size_t)(most - least) + 2, sizeof(int64_t));
    if (rank == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_turns; i++)
        rank[owners[i] - least + 1] = 1;
    for (int64_t i = 0; i <= most - least; i++)
        rank[i + 1] += rank[i];
    for (Py_ssize_t i = 0; i < num_turns; i++)
        ranks[i] = rank[owners[i] - least];
    free(rank);
    return num_turns;
}

/* Writes nodes and inputs at the end of each turn that records something, counted from `first`, and
 * then the owners of these turns to `owners`; returns how many there are. */
static Py_ssize_t
write_turns(const int64_t *turns, Py_ssize_t num_turns, const Py_ssize_t *first, int64_t *ends,
            int64_t *owners)
{
    int64_t nodes = 0, inputs = 0;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < num_turns; i++) {
        int64_t more_nodes = turns[3 * i + 1] - first[CALLS];
        int64_t more_inputs = turns[3 * i + 2] - first[GROUPS];
        if (more_nodes > nodes || more_inputs > inputs) {
            ends[2 * count] = more_nodes;
            ends[2 * count + 1] = more_inputs;
            owners[count++] = turns[3 * i];
        }
        nodes = more_nodes;
        inputs = more_inputs;
    }
    return count;
}

/* round_key((types of nodes, references, groups, turns), (values,), (first of each, first value)): what
 * was recorded in a round, as bytes that are the same for rounds that are alike; None if a value
 * belongs to an earlier round. */
PyObject *
round_key(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given;
    Ints *columns[NUM_COLUMNS];
    Py_ssize_t first[NUM_COLUMNS], counts[NUM_COLUMNS], total = 8;
    long long first_value;
    if (!PyArg_ParseTuple(args, "(O!O!O!O!)O(nnnnL)", ints_type, &columns[0], ints_type,
                          &columns[1], ints_type, &columns[2], ints_type, &columns[3], &given,
                          &first[0], &first[1], &first[2], &first[3], &first_value))
        return NULL;
    const int64_t *items[NUM_COLUMNS];
    for (int i = 0; i < NUM_COLUMNS; i++) {
        counts[i] = columns[i]->count - first[i];
        if (first[i] < 0 || counts[i] < 0 || (i == TURNS && counts[i] % 3 != 0)) {
            PyErr_SetString(PyExc_ValueError, "a round does not begin before its end");
            return NULL;
        }
        items[i] = counts[i] > 0 ? columns[i]->items + first[i] : NULL;
        total += counts[i];
    }
    static const int sizes[1] = {8};
    Buffers buffers = {0};
    void *data[1];
    Py_ssize_t num_values, num_turns = counts[TURNS] / 3, num_inputs = first[GROUPS];
    if (get_buffers(&buffers, given, 1, sizes, data, &num_values) < 0)
        return NULL;
    const int64_t *values = data[0];
    int is_known = num_values > 0;
    for (Py_ssize_t i = 0; is_known && i < num_values; i++)
        is_known = values[i] >= first_value;
    int64_t *key = malloc((size_t)(total + num_values) * sizeof(int64_t)), *at = key;
    int64_t *owners = malloc((size_t)(num_turns + 1) * sizeof(int64_t));
    PyObject *result = NULL;
    if (key == NULL || owners == NULL)
        PyErr_NoMemory();
    else if (!is_known)
        result = Py_NewRef(Py_None);
    else {
        for (int i = 0; i < NUM_COLUMNS; i++)
            *at++ = counts[i];
        *at++ = num_values;
        for (Py_ssize_t i = 0; i < counts[CALLS]; i++)
            *at++ = items[CALLS][i];
        for (Py_ssize_t i = 0; i < counts[REFERENCES]; i++) {
            int64_t x = items[REFERENCES][i];
            *at++ = x >= first_value ? x - first_value : x < -num_inputs ? x + num_inputs : INT64_MIN;
        }
        for (Py_ssize_t i = 0; i < counts[GROUPS]; i++)
            *at++ = items[GROUPS][i];
        Py_ssize_t count = write_turns(items[TURNS], num_turns, first, at, owners);
        key[TURNS] = count;
        at += 2 * count;
        for (Py_ssize_t i = 0; i < num_values; i++)
            *at++ = values[i] - first_value;
        Py_ssize_t num_ranks = write_ranks(owners, count, at);
        if (num_ranks >= 0)
            result = PyBytes_FromStringAndSize((const char *)key,
                                               (at + num_ranks - key) * (Py_ssize_t)sizeof(*key));
    }
    free(key);
    free(owners);
    release_buffers(&buffers);
    return result;
}
