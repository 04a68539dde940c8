/* Nodes cut in two: the twin of `late_operands` and `_with_cuts` in
 * `_record/passes/projections.py`, which say what is computed. */

#include <stdlib.h>

#include "checks.h"

static PyObject *
do_not_fit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays of nodes to be cut do not fit each other");
    return NULL;
}

/* The number of results of all nodes; -1 if types are out of range. */
static int64_t
count_values(const int32_t *node_type, Py_ssize_t num_nodes, const int32_t *num_results,
             Py_ssize_t num_types)
{
    int64_t count = 0;
    if (!are_below(node_type, num_nodes, num_types))
        return -1;
    for (Py_ssize_t t = 0; t < num_types; t++)
        if (num_results[t] < 0)
            return -1;
    for (Py_ssize_t i = 0; i < num_nodes; i++)
        count += num_results[node_type[i]];
    return count;
}

/* mark_makers(most, (type of nodes, results of types, operand_ptr, operands, is made)): marks in
 * bool[T, most, T] which types make which operands of which types. */
PyObject *
mark_makers(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[5] = {4, 4, 8, 4, -1};
    PyObject *given;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "nO", &most, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[5];
    Py_ssize_t lengths[5];
    if (get_buffers(&buffers, given, 5, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node_type = data[0], *num_results = data[1], *operand = data[3];
    const int64_t *operand_ptr = data[2];
    uint8_t *is_made = data[4];
    Py_ssize_t num_nodes = lengths[0], num_types = lengths[1];
    int64_t num_values = count_values(node_type, num_nodes, num_results, num_types), made = 0;
    int32_t *maker = NULL; /* the type that makes each value */
    int fits = num_values >= 0 && most >= 0 && lengths[2] == num_nodes + 1 &&
               are_pointers(operand_ptr, num_nodes + 1, lengths[3]) &&
               lengths[4] == num_types * most * num_types;
    if (fits && (maker = malloc((num_values + 1) * sizeof(int32_t))) == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; fits && maker != NULL && i < num_nodes; i++) {
        int64_t begin = operand_ptr[i], arity = operand_ptr[i + 1] - begin;
        uint8_t *own = is_made + node_type[i] * most * num_types;
        fits = arity <= most;
        for (int64_t k = 0; fits && k < arity; k++) {
            fits = operand[begin + k] < made;
            if (fits && operand[begin + k] >= 0)
                own[k * num_types + maker[operand[begin + k]]] = 1;
        }
        for (int32_t k = 0; k < num_results[node_type[i]]; k++)
            maker[made++] = node_type[i];
    }
    free(maker);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* A graph whose nodes are cut in two, as far as it is written. */
typedef struct {
    const int32_t *place; /* of each value before */
    int32_t *node_type, *operand;
    int64_t *operand_ptr;
    Py_ssize_t room, operand_room, num_nodes, num_operands;
    int64_t num_values;
} Halves;

/* Adds a node without operands yet; 0 without room. */
static int
add_node(Halves *to, int32_t node_type)
{
    if (to->num_nodes >= to->room)
        return 0;
    to->node_type[to->num_nodes++] = node_type;
    return 1;
}

/* Adds operands of the last node, numbers of values before; 0 without room, or where one is not
 * made yet. `which` says which of them, all if it is NULL. */
static int
add_operands(Halves *to, const int32_t *operand, int64_t arity, const int64_t *which,
             int64_t count, int64_t made)
{
    int fits = count <= to->operand_room - to->num_operands;
    for (int64_t k = 0; fits && k < count; k++) {
        int64_t at = which == NULL ? k : which[k];
        fits = at >= 0 && at < arity && operand[at] < made;
        if (fits)
            to->operand[to->num_operands++] =
                operand[at] < 0 ? operand[at] : to->place[operand[at]];
    }
    to->operand_ptr[to->num_nodes] = to->num_operands;
    return fits;
}

/* split_nodes((type of nodes, operand_ptr, operands, outputs, node_ptr, results of types, halves,
 * read_ptr, positions read, ...)): writes the same five arrays of the graph whose nodes of type t are
 * nodes of the types halves[t, 0] and halves[t, 1], unless these are -1. What half h reads of the
 * operands are row 2 t + h of the positions; the second one reads the results of the first, too. */
PyObject *
split_nodes(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[14] = {4, 8, 4, 4, 8, 4, 4, 8, 8, -4, -8, -4, -4, -8};
    Buffers buffers = {0};
    void *data[14];
    Py_ssize_t lengths[14];
    if (get_buffers(&buffers, given, 14, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node_type = data[0], *operand = data[2], *output = data[3];
    const int32_t *num_results = data[5], *half = data[6];
    const int64_t *operand_ptr = data[1], *node_ptr = data[4], *read_ptr = data[7], *read = data[8];
    int32_t *new_output = data[12], *place = NULL;
    int64_t *new_node_ptr = data[13], made = 0;
    Py_ssize_t num_nodes = lengths[0], num_types = lengths[5], instance = 0;
    int64_t num_values = count_values(node_type, num_nodes, num_results, num_types);
    int fits = num_values >= 0 && lengths[1] == num_nodes + 1 &&
               are_pointers(operand_ptr, num_nodes + 1, lengths[2]) &&
               are_pointers(node_ptr, lengths[4], num_nodes) && lengths[6] == 2 * num_types &&
               lengths[7] == 2 * num_types + 1 &&
               are_pointers(read_ptr, 2 * num_types + 1, lengths[8]) &&
               lengths[10] == lengths[9] + 1 && lengths[12] == lengths[3] &&
               lengths[13] == lengths[4];
    for (Py_ssize_t t = 0; fits && t < num_types; t++) {
        int32_t first = half[2 * t], second = half[2 * t + 1];
        fits = first < 0 || (first < num_types && second >= 0 && second < num_types &&
                             num_results[second] == num_results[t]);
    }
    if (fits && (place = malloc((num_values + 1) * sizeof(int32_t))) == NULL)
        PyErr_NoMemory();
    Halves to = {place, data[9], data[11], data[10], lengths[9], lengths[11], 0, 0, 0};
    if (place != NULL)
        to.operand_ptr[0] = 0;
    for (Py_ssize_t i = 0; fits && place != NULL && i < num_nodes; i++) {
        int32_t t = node_type[i], first = half[2 * t];
        const int32_t *own = operand + operand_ptr[i];
        int64_t arity = operand_ptr[i + 1] - operand_ptr[i];
        const int64_t *part = read_ptr + 2 * t;
        while (node_ptr[instance] == i)
            new_node_ptr[instance++] = to.num_nodes;
        if (first < 0) {
            fits = add_node(&to, t) && add_operands(&to, own, arity, NULL, arity, made);
        } else {
            int32_t count = num_results[first];
            fits = add_node(&to, first) &&
                   add_operands(&to, own, arity, read + part[0], part[1] - part[0], made) &&
                   add_node(&to, half[2 * t + 1]) &&
                   add_operands(&to, own, arity, read + part[1], part[2] - part[1], made) &&
                   count <= to.operand_room - to.num_operands;
            for (int32_t k = 0; fits && k < count; k++)
                to.operand[to.num_operands++] = (int32_t)to.num_values++;
            to.operand_ptr[to.num_nodes] = to.num_operands;
        }
        for (int32_t k = 0; fits && k < num_results[t]; k++)
            place[made++] = (int32_t)to.num_values++;
    }
    fits = fits && to.num_nodes == to.room && to.num_operands == to.operand_room;
    for (; fits && place != NULL && instance < lengths[4]; instance++)
        new_node_ptr[instance] = to.num_nodes;
    for (Py_ssize_t i = 0; fits && place != NULL && i < lengths[3]; i++) {
        fits = output[i] < num_values;
        if (fits)
            new_output[i] = output[i] < 0 ? output[i] : place[output[i]];
    }
    free(place);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}
