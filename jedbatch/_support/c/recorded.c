/* Recorded calls as nodes: the twin of parts of `_record/trace.py`, which say what is computed. */

#include "core.h"

enum { RECORDED, REFERENCES, LOCAL, TYPE, WIDTH_PTR, WIDTH, NODE_TYPE, ARITY, OPERAND, NUM };

/* find_operands((call specs of nodes, references, place of each call spec in what follows, node
 * types, width_ptr, widths, node_type, arity, operand)): writes the types of nodes, the number of
 * their operands, and these: for a reference, as many as its width, from it on. Returns how many
 * there are in all. */
PyObject *
find_operands(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[NUM] = {8, 8, 8, 4, 8, 8, -4, -8, -8};
    Buffers buffers = {0};
    void *data[NUM];
    Py_ssize_t lengths[NUM], at = 0, read = 0;
    if (get_buffers(&buffers, given, NUM, sizes, data, lengths) < 0)
        return NULL;
    const int64_t *recorded = data[RECORDED], *reference = data[REFERENCES], *local = data[LOCAL];
    const int64_t *width_ptr = data[WIDTH_PTR], *width = data[WIDTH];
    const int32_t *type = data[TYPE];
    int32_t *node_type = data[NODE_TYPE];
    int64_t *arity = data[ARITY], *operand = data[OPERAND];
    Py_ssize_t num_specs = lengths[TYPE], num_nodes = lengths[RECORDED];
    int fits = lengths[WIDTH_PTR] == num_specs + 1 && lengths[NODE_TYPE] == num_nodes &&
               lengths[ARITY] == num_nodes && width_ptr[0] == 0 &&
               width_ptr[num_specs] == lengths[WIDTH];
    for (Py_ssize_t c = 0; fits && c < num_specs; c++)
        fits = width_ptr[c] <= width_ptr[c + 1];
    for (Py_ssize_t i = 0; fits && i < num_nodes; i++) {
        fits = recorded[i] >= 0 && recorded[i] < lengths[LOCAL];
        int64_t c = fits ? local[recorded[i]] : -1;
        fits = c >= 0 && c < num_specs;
        if (!fits)
            break;
        Py_ssize_t first = at;
        node_type[i] = type[c];
        for (int64_t w = width_ptr[c]; fits && w < width_ptr[c + 1]; w++) {
            fits = read < lengths[REFERENCES] && width[w] >= 0 && width[w] <= lengths[OPERAND] - at;
            for (int64_t k = 0; fits && k < width[w]; k++)
                operand[at++] = reference[read] + k;
            read++;
        }
        arity[i] = at - first;
    }
    fits = fits && read == lengths[REFERENCES];
    release_buffers(&buffers);
    if (fits)
        return PyLong_FromSsize_t(at);
    PyErr_SetString(PyExc_ValueError, "references do not fit the calls");
    return NULL;
}
