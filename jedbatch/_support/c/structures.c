/* Instances of one structure, lowered together: the twin of parts of `_session/plans/copies.py`,
 * which say what is computed. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum {
    NODE, NODE_PTR, BATCH_TYPE, START, PADDED, LANE, COPIES, FIRST_COPY, OPERAND_PTR, OPERAND, ROW,
    INPUT_ARENA, INPUT_PLACE, FIRST_INPUT, FORM, FORM_OF_TYPE, TABLE, NUM_OF_TABLE
};
enum { TYPE, PLACE, NUM_OPERANDS, OFFSET, ROOM, FORM_COLUMNS };

/* What copies are lowered from, with the checks of what is read through them. */
typedef struct {
    void *const *data;
    const Py_ssize_t *lengths;
    Py_ssize_t num_arenas, num_copies;
} Given;

/* Writes the rows of an operand of all copies of a node; returns whether they are there. */
static int
write_copies_of(const Given *x, int64_t reference, int64_t copies, int64_t first_copy, int32_t *rows)
{
    const int64_t *row = x->data[ROW], *first_input = x->data[FIRST_INPUT];
    if (reference >= 0) {
        if (reference >= x->lengths[ROW])
            return 0;
        int32_t first = (int32_t)row[reference];
        for (int64_t c = 0; c < copies; c++)
            rows[c] = first + (int32_t)c;
        return 1;
    }
    int64_t input = -1 - reference;
    if (input >= x->lengths[INPUT_ARENA])
        return 0;
    int32_t arena = ((const int32_t *)x->data[INPUT_ARENA])[input];
    int64_t place = ((const int64_t *)x->data[INPUT_PLACE])[input];
    first_input += first_copy * x->num_arenas + arena;
    for (int64_t c = 0; c < copies; c++)
        rows[c] = (int32_t)(first_input[c * x->num_arenas] + place);
    return 1;
}

/* Writes the operands of a batch, and of the lanes that fill it up; returns whether they fit. */
static int
write_batch(const Given *x, Py_ssize_t batch, const int64_t *form)
{
    const int32_t *node = x->data[NODE], *operand = x->data[OPERAND];
    const int64_t *node_ptr = x->data[NODE_PTR], *operand_ptr = x->data[OPERAND_PTR];
    const int64_t *lane = x->data[LANE], *copies = x->data[COPIES], *first = x->data[FIRST_COPY];
    int64_t start = ((const int64_t *)x->data[START])[batch];
    int64_t padded = ((const int64_t *)x->data[PADDED])[batch], end = start;
    int64_t count = form[NUM_OPERANDS], room = form[ROOM];
    int32_t *rows = (int32_t *)x->data[TABLE] + form[OFFSET];
    if (start < 0 || padded <= 0 || padded > room - start)
        return 0;
    for (int64_t i = node_ptr[batch]; i < node_ptr[batch + 1]; i++) {
        int32_t n = node[i];
        int64_t read = operand_ptr[n];
        int fits = lane[n] == end && copies[n] > 0 && copies[n] <= start + padded - end &&
                   first[n] >= 0 && first[n] <= x->num_copies - copies[n] && read >= 0 &&
                   read <= x->lengths[OPERAND] - count;
        for (int64_t k = 0; fits && k < count; k++)
            fits = write_copies_of(x, operand[read + k], copies[n], first[n],
                                   rows + k * room + lane[n]);
        if (!fits)
            return 0;
        end += copies[n];
    }
    for (int64_t k = 0; k < count && end > start; k++)
        for (int64_t i = end; i < start + padded; i++)
            rows[k * room + i] = rows[k * room + end - 1];
    return end > start;
}

/* write_copies(arenas, (nodes of batches, node_ptr, type of batches, start, lanes of batches, lane of
 * nodes, copies of nodes, first copy of nodes, operand_ptr, operands, row of results, arena of
 * inputs, place of inputs, first inputs of copies, form, form of types, table)): writes the rows of
 * operands of all copies of nodes, which lie next to each other; lanes beyond those of a batch read
 * what its last one does, those beyond all what the first one does. `form` has for each kernel its
 * type, its place in the program, its operands, where they begin in the table, and lanes there. */
PyObject *
write_copies(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[NUM_OF_TABLE] = {4, 8, 4, 8, 8, 8, 8, 8, 8, 4, 8, 4, 8, 8, 8, 4, -4};
    PyObject *given;
    Py_ssize_t num_arenas;
    if (!PyArg_ParseTuple(args, "nO", &num_arenas, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[NUM_OF_TABLE];
    Py_ssize_t lengths[NUM_OF_TABLE];
    if (get_buffers(&buffers, given, NUM_OF_TABLE, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *batch_type = data[BATCH_TYPE], *form_of = data[FORM_OF_TYPE];
    const int64_t *forms = data[FORM];
    int32_t *table = data[TABLE];
    Py_ssize_t num_nodes = lengths[LANE], num_batches = lengths[BATCH_TYPE];
    Py_ssize_t num_forms = lengths[FORM] / FORM_COLUMNS;
    Given x = {data, lengths, num_arenas, num_arenas > 0 ? lengths[FIRST_INPUT] / num_arenas : 0};
    int fits = num_arenas >= 0 && lengths[NODE_PTR] == num_batches + 1 &&
               are_pointers(data[NODE_PTR], num_batches + 1, lengths[NODE]) &&
               are_below(data[NODE], lengths[NODE], num_nodes) &&
               are_below(batch_type, num_batches, lengths[FORM_OF_TYPE]) &&
               lengths[START] == num_batches && lengths[PADDED] == num_batches &&
               lengths[COPIES] == num_nodes && lengths[FIRST_COPY] == num_nodes &&
               lengths[OPERAND_PTR] == num_nodes + 1 &&
               lengths[INPUT_PLACE] == lengths[INPUT_ARENA] &&
               are_below(data[INPUT_ARENA], lengths[INPUT_ARENA], num_arenas);
    for (Py_ssize_t k = 0; fits && k < num_forms; k++) {
        const int64_t *form = forms + k * FORM_COLUMNS;
        fits = form[NUM_OPERANDS] >= 0 && form[NUM_OPERANDS] <= INT32_MAX && form[ROOM] >= 0 &&
               form[ROOM] <= INT32_MAX && form[OFFSET] >= 0 && form[OFFSET] <= lengths[TABLE] &&
               form[NUM_OPERANDS] * form[ROOM] <= lengths[TABLE] - form[OFFSET];
    }
    int64_t *ends = fits ? calloc(num_forms + 1, sizeof(int64_t)) : NULL;
    if (fits && ends == NULL)
        PyErr_NoMemory();
    fits = fits && ends != NULL;
    for (Py_ssize_t b = 0; fits && b < num_batches; b++) {
        int32_t k = form_of[batch_type[b]];
        fits = k >= 0 && k < num_forms && write_batch(&x, b, forms + k * FORM_COLUMNS);
        if (fits) {
            int64_t end = ((int64_t *)data[START])[b] + ((int64_t *)data[PADDED])[b];
            ends[k] = end > ends[k] ? end : ends[k];
        }
    }
    for (Py_ssize_t k = 0; fits && k < num_forms; k++) {
        const int64_t *form = forms + k * FORM_COLUMNS;
        for (int64_t j = 0; ends[k] > 0 && j < form[NUM_OPERANDS]; j++) {
            int32_t *rows = table + form[OFFSET] + j * form[ROOM];
            for (int64_t i = ends[k]; i < form[ROOM]; i++)
                rows[i] = rows[0];
        }
    }
    free(ends);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}
