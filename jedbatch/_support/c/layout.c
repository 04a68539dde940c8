/* Lanes and rows of a scheduled graph: the twin of parts of `_layout/layout.py`,
 * `_layout/node_order.py` and `_program/lower.py`, which say what is computed. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

static PyObject *
do_not_fit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays of a layout do not fit each other");
    return NULL;
}

/* number_lanes((node, node_ptr, start, first, padded, lane_node, lane)): the lanes of batches that
 * begin in lane `start` of their type, the lane `first` of all, and have `padded` lanes. Writes the
 * node of every lane, the last one of a batch again where there are no more, and the lane of every
 * node. */
PyObject *
number_lanes(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[7] = {4, 8, 8, 8, 8, -4, -8};
    Buffers buffers = {0};
    void *data[7];
    Py_ssize_t lengths[7];
    if (get_buffers(&buffers, given, 7, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node = data[0];
    const int64_t *node_ptr = data[1], *start = data[2], *first = data[3], *padded = data[4];
    int32_t *lane_node = data[5];
    int64_t *lane = data[6];
    Py_ssize_t num_batches = lengths[2], num_nodes = lengths[0];
    int fits = lengths[1] == num_batches + 1 && lengths[3] == num_batches &&
               lengths[4] == num_batches && lengths[6] == num_nodes &&
               are_pointers(node_ptr, num_batches + 1, num_nodes) &&
               are_below(node, num_nodes, num_nodes);
    for (Py_ssize_t b = 0; fits && b < num_batches; b++) {
        int64_t size = node_ptr[b + 1] - node_ptr[b];
        const int32_t *nodes = node + node_ptr[b];
        fits = size > 0 && padded[b] >= size && first[b] >= 0 &&
               first[b] + padded[b] <= lengths[5];
        for (int64_t i = 0; fits && i < size; i++)
            lane[nodes[i]] = start[b] + i;
        if (fits)
            memcpy(lane_node + first[b], nodes, size * sizeof(int32_t));
        for (int64_t i = size; fits && i < padded[b]; i++)
            lane_node[first[b] + i] = nodes[size - 1];
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
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

/* first_reads((makers, readers, type of nodes, is chained, place, first)): lowers `first` of what
 * types that make no chains make to the first place of a reader of a type that does, and returns
 * whether there is one. */
PyObject *
first_reads(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[6] = {4, 4, 4, 1, 4, -4};
    Buffers buffers = {0};
    void *data[6];
    Py_ssize_t lengths[6];
    if (get_buffers(&buffers, given, 6, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *maker = data[0], *reader = data[1], *node_type = data[2], *place = data[4];
    const uint8_t *is_chained = data[3];
    int32_t *first = data[5];
    Py_ssize_t num_nodes = lengths[2];
    int is_any = 0;
    int fits = lengths[0] == lengths[1] && lengths[4] == num_nodes && lengths[5] == num_nodes &&
               are_below(maker, lengths[0], num_nodes) &&
               are_below(reader, lengths[1], num_nodes) &&
               are_below(node_type, num_nodes, lengths[3]);
    for (Py_ssize_t e = 0; fits && e < lengths[0]; e++) {
        int32_t a = maker[e], b = reader[e];
        if (!is_chained[node_type[b]] || is_chained[node_type[a]])
            continue;
        is_any = 1;
        first[a] = place[b] < first[a] ? place[b] : first[a];
    }
    release_buffers(&buffers);
    return fits ? PyBool_FromLong(is_any) : do_not_fit();
}

/* value_rows(most, (node, node_ptr, type of batches, results of types, value_ptr, lane, base,
 * row)): writes the row of each value: of result s of a node of batch b, its lane after base[b, s].
 * `base` has `most` columns. */
PyObject *
value_rows(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[8] = {4, 8, 4, 4, 8, 8, 8, -8};
    PyObject *given;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "nO", &most, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[8];
    Py_ssize_t lengths[8];
    if (get_buffers(&buffers, given, 8, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node = data[0], *batch_type = data[2], *num_results = data[3];
    const int64_t *node_ptr = data[1], *value_ptr = data[4], *lane = data[5], *base = data[6];
    int64_t *row = data[7];
    Py_ssize_t num_nodes = lengths[0], num_batches = lengths[2];
    int fits = most >= 0 && lengths[1] == num_batches + 1 &&
               are_pointers(node_ptr, num_batches + 1, num_nodes) &&
               are_below(node, num_nodes, num_nodes) &&
               are_below(batch_type, num_batches, lengths[3]) &&
               lengths[4] == num_nodes + 1 && lengths[5] == num_nodes &&
               lengths[6] == num_batches * most && value_ptr[0] == 0 &&
               value_ptr[num_nodes] <= lengths[7];
    for (Py_ssize_t b = 0; fits && b < num_batches; b++) {
        int32_t count = num_results[batch_type[b]];
        fits = count >= 0 && count <= most;
        for (int64_t i = node_ptr[b]; fits && i < node_ptr[b + 1]; i++) {
            int64_t value = value_ptr[node[i]];
            fits = value >= 0 && value + count <= lengths[7];
            for (int32_t s = 0; fits && s < count; s++)
                row[value + s] = base[b * most + s] + lane[node[i]];
        }
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* operand_rows(operands, (nodes of lanes, operand_ptr, operands of nodes, row, rows)): writes to
 * int32[operands, room] the row of each operand of the node in each lane; beyond the lanes, that of
 * the first lane. An operand is a place in `row`, from its end if it is negative; None stands for
 * operands in order. */
PyObject *
operand_rows(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[5] = {4, 8, 4, 8, -4};
    PyObject *given;
    Py_ssize_t num_operands;
    if (!PyArg_ParseTuple(args, "nO", &num_operands, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[5];
    Py_ssize_t lengths[5];
    if (get_buffers(&buffers, given, 5, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node = data[0], *operand = data[2];
    const int64_t *operand_ptr = data[1], *row = data[3];
    int32_t *rows = data[4];
    Py_ssize_t num_lanes = lengths[0], num_read = operand == NULL ? lengths[3] : lengths[2];
    Py_ssize_t room = num_operands > 0 ? lengths[4] / num_operands : 0;
    int fits = num_operands >= 0 && lengths[4] == room * num_operands &&
               (num_operands == 0 || num_lanes <= room) && lengths[1] > 0 &&
               are_below(node, num_lanes, lengths[1] - 1);
    for (Py_ssize_t i = 0; fits && i < num_lanes; i++) {
        int64_t first = operand_ptr[node[i]];
        fits = first >= 0 && first + num_operands <= num_read;
        for (Py_ssize_t k = 0; fits && k < num_operands; k++) {
            int64_t at = operand == NULL ? first + k : operand[first + k];
            at += at < 0 ? lengths[3] : 0;
            fits = at >= 0 && at < lengths[3];
            rows[k * room + i] = fits ? (int32_t)row[at] : 0;
        }
    }
    for (Py_ssize_t k = 0; fits && num_lanes > 0 && k < num_operands; k++)
        for (Py_ssize_t i = num_lanes; i < room; i++)
            rows[k * room + i] = rows[k * room];
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}
