/* Longest paths in graphs: the twin of `_graph/paths.py`, which says what they are. */

#include <stdlib.h>

#include "core.h"

enum { BEFORE, AFTER, LENGTH, NUM_OF_PATHS };
enum { KIND = NUM_OF_PATHS, NUM_OF_CHAINS };

static int
are_edges(void *const *data, const Py_ssize_t *lengths)
{
    const int32_t *before = data[BEFORE], *after = data[AFTER];
    int fits = lengths[BEFORE] == lengths[AFTER];
    for (Py_ssize_t e = 0; fits && e < lengths[BEFORE]; e++)
        fits = before[e] >= 0 && before[e] < lengths[LENGTH] && after[e] >= 0 &&
               after[e] < lengths[LENGTH];
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "the graph has edges out of range");
    return fits;
}

/* longest_paths((before, after, length)): adds to `length` the edges of longest paths. */
PyObject *
longest_paths(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[NUM_OF_PATHS] = {4, 4, -4};
    Buffers buffers = {0};
    void *data[NUM_OF_PATHS];
    Py_ssize_t lengths[NUM_OF_PATHS];
    if (get_buffers(&buffers, given, NUM_OF_PATHS, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *before = data[BEFORE], *after = data[AFTER];
    int32_t *length = data[LENGTH];
    int fits = are_edges(data, lengths);
    for (Py_ssize_t e = 0; fits && e < lengths[BEFORE]; e++)
        if (length[after[e]] <= length[before[e]])
            length[after[e]] = length[before[e]] + 1;
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* longest_chains((before, after, longest, kind)): writes to `longest` the nodes of longest chains.
 * One pass over the edges for every kind. */
PyObject *
longest_chains(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[NUM_OF_CHAINS] = {4, 4, -4, 4};
    Buffers buffers = {0};
    void *data[NUM_OF_CHAINS];
    Py_ssize_t lengths[NUM_OF_CHAINS];
    if (get_buffers(&buffers, given, NUM_OF_CHAINS, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *before = data[BEFORE], *after = data[AFTER], *kind = data[KIND];
    int32_t *longest = data[LENGTH], last = -1;
    Py_ssize_t num_nodes = lengths[LENGTH], num_edges = lengths[BEFORE];
    int is_done = lengths[KIND] == num_nodes && are_edges(data, lengths);
    int32_t *chain = is_done ? malloc((num_nodes + 1) * sizeof(int32_t)) : NULL;
    if (!is_done && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "not one kind for each node");
    if (is_done && chain == NULL) {
        PyErr_NoMemory();
        is_done = 0;
    }
    for (Py_ssize_t i = 0; is_done && i < num_nodes; i++)
        last = kind[i] > last ? kind[i] : last;
    for (int32_t k = 0; is_done && k <= last; k++) {
        for (Py_ssize_t i = 0; i < num_nodes; i++)
            chain[i] = kind[i] == k;
        for (Py_ssize_t e = 0; e < num_edges; e++) {
            int32_t length = chain[before[e]] + (kind[after[e]] == k);
            if (length > chain[after[e]])
                chain[after[e]] = length;
        }
        for (Py_ssize_t i = 0; i < num_nodes; i++)
            if (kind[i] == k)
                longest[i] = chain[i];
    }
    free(chain);
    release_buffers(&buffers);
    return is_done ? Py_NewRef(Py_None) : NULL;
}
