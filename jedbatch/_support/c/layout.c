/* The order of nodes in batches: the twin of a part of `_layout/node_order.py`, which says what is
 * computed. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

static PyObject *
do_not_fit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays of a layout do not fit each other");
    return NULL;
}

/* sort_batches((node, node_ptr, is sorted, key)): sorts the nodes of some batches by their keys,
 * in place; those with equal keys stay as they are. Keys lie in a range not much wider than there
 * are nodes. */
PyObject *
sort_batches(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[4] = {-4, 8, 1, 4};
    Buffers buffers = {0};
    void *data[4];
    Py_ssize_t lengths[4];
    if (get_buffers(&buffers, given, 4, sizes, data, lengths) < 0)
        return NULL;
    int32_t *node = data[0], *sorted = NULL, *batch = NULL; /* the sorted nodes, their batches */
    const int64_t *node_ptr = data[1];
    const uint8_t *is_sorted = data[2];
    const int32_t *key = data[3];
    Py_ssize_t num_nodes = lengths[0], num_batches = lengths[2], num_moving = 0;
    int64_t least = INT32_MAX, most = INT32_MIN, *count = NULL;
    int fits = lengths[1] == num_batches + 1 && are_pointers(node_ptr, num_batches + 1, num_nodes) &&
               are_below(node, num_nodes, lengths[3]);
    for (Py_ssize_t b = 0; fits && b < num_batches; b++)
        for (int64_t i = node_ptr[b]; is_sorted[b] && i < node_ptr[b + 1]; i++) {
            int64_t k = key[node[i]];
            least = k < least ? k : least;
            most = k > most ? k : most;
            num_moving++;
        }
    int64_t range = num_moving > 0 ? most - least + 1 : 0;
    fits = fits && range <= 4 * (int64_t)lengths[3] + 64;
    if (fits) {
        sorted = malloc((num_moving + 1) * sizeof(int32_t));
        batch = malloc((num_moving + 1) * sizeof(int32_t));
        count = calloc((range > num_batches ? range : num_batches) + 2, sizeof(int64_t));
        if (sorted == NULL || batch == NULL || count == NULL)
            PyErr_NoMemory();
    }
    if (fits && !PyErr_Occurred()) { /* by key, and then, as they are, by batch */
        for (Py_ssize_t b = 0; b < num_batches; b++)
            for (int64_t i = node_ptr[b]; is_sorted[b] && i < node_ptr[b + 1]; i++)
                count[key[node[i]] - least + 1]++;
        for (int64_t k = 0; k < range; k++)
            count[k + 1] += count[k];
        for (Py_ssize_t b = 0; b < num_batches; b++)
            for (int64_t i = node_ptr[b]; is_sorted[b] && i < node_ptr[b + 1]; i++) {
                int64_t at = count[key[node[i]] - least]++;
                sorted[at] = node[i];
                batch[at] = (int32_t)b;
            }
        memcpy(count, node_ptr, num_batches * sizeof(int64_t));
        for (Py_ssize_t i = 0; i < num_moving; i++)
            node[count[batch[i]]++] = sorted[i];
    }
    free(sorted);
    free(batch);
    free(count);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}
