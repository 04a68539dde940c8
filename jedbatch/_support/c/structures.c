/* Instances of one structure: found by digests, compared, and lowered together. The twin of
 * `_graph/structures.py` and of parts of `_session/copies.py`, which say what is computed.
 */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { NUM_BOUNDS = 10 };
enum { NODES, OPERANDS, INPUTS, OUTPUTS, RESULTS };

static PyObject *
do_not_fit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays of instances do not fit each other");
    return NULL;
}

/* The columns of a graph. */
typedef struct {
    const int32_t *node_type, *operand, *outputs;
    const int64_t *operand_ptr;
    Py_ssize_t num_nodes, num_ptr, num_operands, num_outputs;
} Columns;

static Columns
columns_of(void *const *data, const Py_ssize_t *lengths)
{
    return (Columns){.node_type = data[0], .operand_ptr = data[1], .operand = data[2],
                     .outputs = data[3], .num_nodes = lengths[0], .num_ptr = lengths[1],
                     .num_operands = lengths[2], .num_outputs = lengths[3]};
}

/* Whether the share of an instance lies in its graph. */
static int
lies_in(const Columns *x, const int64_t *bound)
{
    for (int k = 0; k < NUM_BOUNDS; k += 2)
        if (bound[k] < 0 || bound[k + 1] < bound[k])
            return 0;
    return bound[2 * NODES + 1] <= x->num_nodes && bound[2 * NODES + 1] < x->num_ptr &&
           bound[2 * OPERANDS + 1] <= x->num_operands && bound[2 * OUTPUTS + 1] <= x->num_outputs;
}

/* A reference counted from the first result, or the first input, of the instance. */
static int64_t
from_zero(const int64_t *bound, int32_t reference)
{
    return reference >= 0 ? reference - bound[2 * RESULTS] : reference + bound[2 * INPUTS];
}

typedef struct {
    uint64_t a, b;
} Digest;

static inline void
stir(Digest *x, int64_t word)
{
    x->a = (x->a ^ (uint64_t)word) * 0x9E3779B97F4A7C15u;
    x->a ^= x->a >> 32;
    x->b = (x->b + (uint64_t)word) * 0xC2B2AE3D27D4EB4Fu;
    x->b ^= x->b >> 29;
}

static Digest
digest(const Columns *x, const int64_t *bound)
{
    Digest found = {0x243F6A8885A308D3u, 0x13198A2E03707344u};
    for (int k = 0; k < NUM_BOUNDS; k += 2)
        stir(&found, bound[k + 1] - bound[k]);
    for (int64_t i = bound[2 * NODES]; i < bound[2 * NODES + 1]; i++) {
        stir(&found, x->node_type[i]);
        stir(&found, x->operand_ptr[i + 1] - bound[2 * OPERANDS]);
    }
    for (int64_t i = bound[2 * OPERANDS]; i < bound[2 * OPERANDS + 1]; i++)
        stir(&found, from_zero(bound, x->operand[i]));
    for (int64_t i = bound[2 * OUTPUTS]; i < bound[2 * OUTPUTS + 1]; i++)
        stir(&found, from_zero(bound, x->outputs[i]));
    return found;
}

static int
compute_the_same(const Columns *x, const int64_t *a, const Columns *y, const int64_t *b)
{
    for (int k = 0; k < NUM_BOUNDS; k += 2)
        if (a[k + 1] - a[k] != b[k + 1] - b[k])
            return 0;
    int64_t num_nodes = a[1] - a[0];
    const int64_t *p = x->operand_ptr + a[0], *q = y->operand_ptr + b[0];
    int same = memcmp(x->node_type + a[0], y->node_type + b[0], num_nodes * sizeof(int32_t)) == 0;
    for (int64_t i = 0; same && i <= num_nodes; i++)
        same = p[i] - a[2 * OPERANDS] == q[i] - b[2 * OPERANDS];
    for (int64_t i = 0; same && i < a[2 * OPERANDS + 1] - a[2 * OPERANDS]; i++)
        same = from_zero(a, x->operand[a[2 * OPERANDS] + i]) ==
               from_zero(b, y->operand[b[2 * OPERANDS] + i]);
    for (int64_t i = 0; same && i < a[2 * OUTPUTS + 1] - a[2 * OUTPUTS]; i++)
        same = from_zero(a, x->outputs[a[2 * OUTPUTS] + i]) ==
               from_zero(b, y->outputs[b[2 * OUTPUTS] + i]);
    return same;
}

/* What instances are told apart by: their share of a graph, and words that describe their inputs. */
typedef struct {
    Columns columns;
    const int64_t *bounds, *input_ptr, *words;
} Instances;

static Digest
digest_of(const Instances *x, Py_ssize_t i)
{
    Digest found = digest(&x->columns, x->bounds + i * NUM_BOUNDS);
    for (int64_t w = x->input_ptr[i]; w < x->input_ptr[i + 1]; w++)
        stir(&found, x->words[w]);
    return found;
}

static int
are_alike(const Instances *x, Py_ssize_t i, Py_ssize_t j)
{
    const int64_t *ptr = x->input_ptr;
    int64_t count = ptr[i + 1] - ptr[i];
    return ptr[j + 1] - ptr[j] == count &&
           memcmp(x->words + ptr[i], x->words + ptr[j], count * sizeof(int64_t)) == 0 &&
           compute_the_same(&x->columns, x->bounds + i * NUM_BOUNDS, &x->columns,
                            x->bounds + j * NUM_BOUNDS);
}

/* Writes the first instance like each one; -1 with an error without memory. */
static int
find_first(const Instances *x, Py_ssize_t count, const Digest *digests, int64_t *first)
{
    size_t room = 2;
    while (room < 2 * (size_t)count)
        room *= 2;
    int64_t *slots = calloc(room, sizeof(int64_t)); /* 1 + the number of an instance */
    if (slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t at = digests[i].a & (room - 1);
        for (; slots[at] != 0; at = (at + 1) & (room - 1)) {
            const Digest *other = &digests[slots[at] - 1];
            if (other->a == digests[i].a && other->b == digests[i].b &&
                are_alike(x, i, slots[at] - 1))
                break;
        }
        if (slots[at] == 0)
            slots[at] = i + 1;
        first[i] = slots[at] - 1;
    }
    free(slots);
    return 0;
}

/* digest_instances((type of nodes, operand_ptr, operands, outputs, bounds, input_ptr, words,
 * digests, first)): writes two words for each instance, equal for instances that compute the same
 * of inputs that are described by the same `words`, and the first instance that does; input_ptr
 * says where the words of each begin. */
PyObject *
digest_instances(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[9] = {4, 8, 4, 4, 8, 8, 8, -8, -8};
    Buffers buffers = {0};
    void *data[9];
    Py_ssize_t lengths[9];
    if (get_buffers(&buffers, given, 9, sizes, data, lengths) < 0)
        return NULL;
    Instances x = {columns_of(data, lengths), data[4], data[5], data[6]};
    Digest *digests = data[7];
    Py_ssize_t count = lengths[8];
    int fits = lengths[7] == 2 * count && lengths[4] == count * NUM_BOUNDS &&
               lengths[5] == count + 1 && are_pointers(x.input_ptr, count + 1, lengths[6]);
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        fits = lies_in(&x.columns, x.bounds + i * NUM_BOUNDS);
        if (fits)
            digests[i] = digest_of(&x, i);
    }
    int failed = fits && find_first(&x, count, digests, data[8]) < 0;
    release_buffers(&buffers);
    if (failed)
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* same_instance((type of nodes, operand_ptr, operands, outputs, bounds) of one instance, of another
 * one): whether they compute the same of their inputs. */
PyObject *
same_instance(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[5] = {4, 8, 4, 4, 8};
    PyObject *one, *other;
    if (!PyArg_ParseTuple(args, "OO", &one, &other))
        return NULL;
    Buffers buffers = {0};
    void *a[5], *b[5];
    Py_ssize_t lengths[5], other_lengths[5];
    if (get_buffers(&buffers, one, 5, sizes, a, lengths) < 0 ||
        get_buffers(&buffers, other, 5, sizes, b, other_lengths) < 0)
        return NULL;
    Columns x = columns_of(a, lengths), y = columns_of(b, other_lengths);
    int fits = lengths[4] == NUM_BOUNDS && other_lengths[4] == NUM_BOUNDS && lies_in(&x, a[4]) &&
               lies_in(&y, b[4]);
    int same = fits && compute_the_same(&x, a[4], &y, b[4]);
    release_buffers(&buffers);
    return fits ? PyBool_FromLong(same) : do_not_fit();
}

/* --- tables --- */

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
