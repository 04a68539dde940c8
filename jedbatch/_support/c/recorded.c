/* Recorded calls as nodes: the twin of parts of `_record/run/trace.py`, which say what is computed. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum {
    RECORDED, REFERENCES, ARITY, GROUP, RESULT, INPUT_PTR, NODE_TYPE, OPERAND_PTR, OPERAND,
    NARROW_RESULT, KEPT, KEPT_PTR, CUTS, NUM
};

/* The inputs of a recording: the instance of each, its place among those that are read, -1 for
 * others, an order, and how many there are of each group or instance. */
typedef struct {
    int64_t *owner, *place, *order, *counts;
} Inputs;

/* Sorts some inputs by a key, stably, into `to`. */
static void
sort_inputs(const int64_t *from, int64_t *to, Py_ssize_t count, const int64_t *key,
            int64_t *counts, Py_ssize_t num_keys)
{
    memset(counts, 0, (num_keys + 1) * sizeof(int64_t));
    for (Py_ssize_t i = 0; i < count; i++)
        counts[key[from[i]] + 1]++;
    for (Py_ssize_t k = 0; k < num_keys; k++)
        counts[k + 1] += counts[k];
    for (Py_ssize_t i = 0; i < count; i++)
        to[counts[key[from[i]]]++] = from[i];
}

/* Marks the inputs that references name; 0 if one of them is not there. */
static int
mark(const int64_t *reference, Py_ssize_t count, int64_t *place, Py_ssize_t num_inputs)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (reference[i] < -num_inputs)
            return 0;
        if (reference[i] < 0)
            place[-1 - reference[i]] = 0;
    }
    return 1;
}

static void
narrow(const int64_t *reference, int32_t *to, Py_ssize_t count, const int64_t *place)
{
    for (Py_ssize_t i = 0; i < count; i++)
        to[i] = (int32_t)(reference[i] >= 0 ? reference[i] : -1 - place[-1 - reference[i]]);
}

/* Writes the types of nodes and where the operands of each begin; 0 if references do not fit. */
static int
write_nodes(void *const *data, const Py_ssize_t *lengths)
{
    const int64_t *recorded = data[RECORDED], *arity = data[ARITY];
    int32_t *node_type = data[NODE_TYPE];
    int64_t *operand_ptr = data[OPERAND_PTR], room = lengths[REFERENCES];
    operand_ptr[0] = 0;
    for (Py_ssize_t i = 0; i < lengths[RECORDED]; i++) {
        int64_t c = recorded[i];
        if (c < 0 || c >= lengths[ARITY] || arity[c] < 0 || arity[c] > room - operand_ptr[i])
            return 0;
        node_type[i] = (int32_t)c;
        operand_ptr[i + 1] = operand_ptr[i] + arity[c];
    }
    return operand_ptr[lengths[RECORDED]] == room;
}

/* write_graph(groups, (types of nodes, references, numbers of operands of each type, groups of
 * inputs, results, input_ptr, node_type, operand_ptr, operand, results, kept, input_ptr of these,
 * cuts)): writes nodes and operands; leaves out inputs that are not read, puts those of an instance
 * in the order of their `groups`, and writes which are `kept`, in order, and where the instance or
 * the group changes. Returns the numbers of inputs and of cuts. */
PyObject *
write_graph(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[NUM] = {8, 8, 8, 8, 8, 8, -4, -8, -4, -4, -8, -8, -8};
    PyObject *given;
    Py_ssize_t num_groups;
    if (!PyArg_ParseTuple(args, "nO", &num_groups, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[NUM];
    Py_ssize_t lengths[NUM];
    if (get_buffers(&buffers, given, NUM, sizes, data, lengths) < 0)
        return NULL;
    const int64_t *reference = data[REFERENCES], *group = data[GROUP], *result = data[RESULT];
    const int64_t *input_ptr = data[INPUT_PTR];
    int64_t *kept = data[KEPT], *kept_ptr = data[KEPT_PTR];
    int64_t *cuts = data[CUTS], *memory = NULL;
    Py_ssize_t num_nodes = lengths[RECORDED], num_inputs = lengths[GROUP], num_kept = 0;
    Py_ssize_t num_instances = lengths[INPUT_PTR] - 1, num_cuts = 0, count = lengths[REFERENCES];
    Inputs x = {0};
    int fits = lengths[NODE_TYPE] == num_nodes && lengths[OPERAND_PTR] == num_nodes + 1 &&
               num_groups >= 0 && lengths[OPERAND] == count &&
               lengths[NARROW_RESULT] == lengths[RESULT] && lengths[KEPT] == num_inputs &&
               lengths[KEPT_PTR] == num_instances + 1 && lengths[CUTS] == num_inputs &&
               are_pointers(input_ptr, num_instances + 1, num_inputs) && write_nodes(data, lengths);
    if (fits) {
        Py_ssize_t num_keys = num_groups > num_instances ? num_groups : num_instances;
        if (num_keys > PY_SSIZE_T_MAX / 16 - 3 * num_inputs ||
            (memory = malloc((3 * num_inputs + num_keys + 2) * sizeof(int64_t))) == NULL)
            PyErr_NoMemory();
    }
    if (memory != NULL) {
        x.owner = memory;
        x.place = x.owner + num_inputs;
        x.order = x.place + num_inputs;
        x.counts = x.order + num_inputs;
        for (Py_ssize_t b = 0; b < num_instances; b++)
            for (int64_t i = input_ptr[b]; i < input_ptr[b + 1]; i++)
                x.owner[i] = b;
        for (Py_ssize_t i = 0; i < num_inputs; i++)
            x.place[i] = -1;
        fits = mark(reference, count, x.place, num_inputs) &&
               mark(result, lengths[RESULT], x.place, num_inputs);
        int differ = 0;
        for (Py_ssize_t i = 0; fits && i < num_inputs; i++) {
            if (x.place[i] < 0)
                continue;
            fits = group[i] >= 0 && group[i] < num_groups;
            kept[num_kept++] = i;
            differ |= group[i] != group[kept[0]];
        }
        if (fits && differ) {
            sort_inputs(kept, x.order, num_kept, group, x.counts, num_groups);
            sort_inputs(x.order, kept, num_kept, x.owner, x.counts, num_instances);
        }
    }
    if (memory != NULL && fits) {
        memset(kept_ptr, 0, (num_instances + 1) * sizeof(int64_t));
        for (Py_ssize_t i = 0; i < num_kept; i++) {
            int64_t own = kept[i], last = i > 0 ? kept[i - 1] : 0;
            x.place[own] = i;
            kept_ptr[x.owner[own] + 1]++;
            if (i == 0 || group[own] != group[last] || x.owner[own] != x.owner[last])
                cuts[num_cuts++] = i;
        }
        for (Py_ssize_t b = 0; b < num_instances; b++)
            kept_ptr[b + 1] += kept_ptr[b];
        narrow(reference, data[OPERAND], count, x.place);
        narrow(result, data[NARROW_RESULT], lengths[RESULT], x.place);
    }
    free(memory);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "references do not fit the calls");
    return fits ? Py_BuildValue("(nn)", num_kept, num_cuts) : NULL;
}
