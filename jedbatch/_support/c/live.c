/* Rows that values share over time: the twin of parts of `_layout/live_ranges.py` and
 * `_layout/allocator.py`, which say what is computed. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

static PyObject *
do_not_fit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays of live blocks do not fit each other");
    return NULL;
}

/* last_reads((type of nodes, results of types, operand_ptr, operands, outputs, node, node_ptr,
 * block_ptr, last)): writes the last batch that reads each block; its own if there is none, and the
 * number of batches if an output is in it. Result s of a batch is block s of its row. */
PyObject *
last_reads(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[9] = {4, 4, 8, 4, 4, 4, 8, 8, -8};
    Buffers buffers = {0};
    void *data[9];
    Py_ssize_t lengths[9];
    if (get_buffers(&buffers, given, 9, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node_type = data[0], *num_results = data[1], *operand = data[3];
    const int32_t *output = data[4], *node = data[5];
    const int64_t *operand_ptr = data[2], *node_ptr = data[6], *block_ptr = data[7];
    int64_t *last = data[8], num_values = 0, made = 0;
    Py_ssize_t num_nodes = lengths[0], num_batches = lengths[6] - 1;
    int32_t *batch = NULL, *block = NULL; /* of each node, and of each value */
    int fits = lengths[2] == num_nodes + 1 &&
               are_pointers(operand_ptr, num_nodes + 1, lengths[3]) &&
               are_below(node_type, num_nodes, lengths[1]) && lengths[5] == num_nodes &&
               are_below(node, num_nodes, num_nodes) &&
               are_pointers(node_ptr, num_batches + 1, num_nodes) &&
               lengths[7] == num_batches + 1 &&
               are_pointers(block_ptr, num_batches + 1, lengths[8]);
    for (Py_ssize_t t = 0; fits && t < lengths[1]; t++)
        fits = num_results[t] >= 0;
    for (Py_ssize_t i = 0; fits && i < num_nodes; i++)
        num_values += num_results[node_type[i]];
    if (fits && (batch = calloc(num_nodes + num_values + 1, sizeof(int32_t))) == NULL)
        PyErr_NoMemory();
    if (batch != NULL)
        block = batch + num_nodes;
    for (Py_ssize_t b = 0; block != NULL && b < num_batches; b++)
        for (int64_t k = node_ptr[b]; k < node_ptr[b + 1]; k++)
            batch[node[k]] = (int32_t)b;
    for (Py_ssize_t b = 0; block != NULL && b < num_batches; b++)
        for (int64_t k = block_ptr[b]; k < block_ptr[b + 1]; k++)
            last[k] = b;
    for (Py_ssize_t i = 0; fits && block != NULL && i < num_nodes; i++) {
        int64_t own = batch[i], count = num_results[node_type[i]];
        for (int64_t k = operand_ptr[i]; fits && k < operand_ptr[i + 1]; k++) {
            fits = operand[k] < made;
            if (fits && operand[k] >= 0 && last[block[operand[k]]] < own)
                last[block[operand[k]]] = own;
        }
        fits = fits && count <= block_ptr[own + 1] - block_ptr[own];
        for (int64_t k = 0; fits && k < count; k++)
            block[made++] = (int32_t)(block_ptr[own] + k);
    }
    for (Py_ssize_t i = 0; fits && block != NULL && i < lengths[4]; i++) {
        fits = output[i] < made;
        if (fits && output[i] >= 0)
            last[block[output[i]]] = num_batches;
    }
    free(batch);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

typedef struct {
    int64_t when, size; /* of equal times the larger first, and then by index */
    Py_ssize_t index;
} Event;

static int
in_time(const void *one, const void *other)
{
    const Event *a = one, *b = other;
    if (a->when != b->when)
        return a->when < b->when ? -1 : 1;
    if (a->size != b->size)
        return a->size > b->size ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

/* Free rows: gaps that touch no other, ascending, and all rows from `top` on. */
typedef struct {
    int64_t (*gap)[2];
    Py_ssize_t count;
    int64_t top;
} Gaps;

/* Returns the first of rows in the smallest gap that fits, in the lowest of equal ones. */
static int64_t
take_rows(Gaps *gaps, int64_t rows)
{
    Py_ssize_t best = -1;
    for (Py_ssize_t g = 0; g < gaps->count; g++) {
        int64_t length = gaps->gap[g][1] - gaps->gap[g][0];
        if (length >= rows && (best < 0 || length < gaps->gap[best][1] - gaps->gap[best][0]))
            best = g;
    }
    if (best < 0) {
        gaps->top += rows;
        return gaps->top - rows;
    }
    int64_t low = gaps->gap[best][0];
    gaps->gap[best][0] += rows;
    if (gaps->gap[best][0] == gaps->gap[best][1])
        memmove(gaps->gap + best, gaps->gap + best + 1,
                (--gaps->count - best) * sizeof(*gaps->gap));
    return low;
}

/* Makes rows free, together with the gaps that they touch. */
static void
give_rows(Gaps *gaps, int64_t low, int64_t high)
{
    Py_ssize_t begin = 0, end = gaps->count; /* gaps from here on lie above the rows */
    while (begin < end) {
        Py_ssize_t middle = (begin + end) / 2;
        if (gaps->gap[middle][0] < low)
            begin = middle + 1;
        else
            end = middle;
    }
    if (end < gaps->count && gaps->gap[end][0] == high)
        high = gaps->gap[end++][1];
    if (begin > 0 && gaps->gap[begin - 1][1] == low)
        low = gaps->gap[--begin][0];
    Py_ssize_t kept = high != gaps->top; /* as a gap, in the place of those from begin to end */
    memmove(gaps->gap + begin + kept, gaps->gap + end, (gaps->count - end) * sizeof(*gaps->gap));
    gaps->count += begin + kept - end;
    if (kept) {
        gaps->gap[begin][0] = low;
        gaps->gap[begin][1] = high;
    } else {
        gaps->top = low;
    }
}

/* scan_through_time((size, first, last, offset)): places each block in the smallest gap that fits
 * when its time comes. (The rows needed in all, the most rows alive at one step.) */
PyObject *
scan_through_time(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[4] = {8, 8, 8, -8};
    Buffers buffers = {0};
    void *data[4];
    Py_ssize_t lengths[4];
    if (get_buffers(&buffers, given, 4, sizes, data, lengths) < 0)
        return NULL;
    const int64_t *size = data[0], *first = data[1], *last = data[2];
    int64_t *offset = data[3], peak = 0, alive = 0, bound = 0;
    Py_ssize_t count = lengths[0], num_blocks = 0, ended = 0;
    int fits = lengths[1] == count && lengths[2] == count && lengths[3] == count;
    for (Py_ssize_t i = 0; fits && i < count; i++)
        fits = size[i] >= 0 && first[i] <= last[i];
    Event *begin = malloc((2 * count + 1) * sizeof(Event));
    Gaps gaps = {malloc((count + 1) * sizeof(*gaps.gap)), 0, 0};
    if (begin == NULL || gaps.gap == NULL)
        PyErr_NoMemory();
    if (fits && !PyErr_Occurred()) {
        Event *end = begin + count;
        for (Py_ssize_t i = 0; i < count; i++) {
            offset[i] = 0;
            if (size[i] > 0)
                begin[num_blocks++] = (Event){first[i], size[i], i};
        }
        qsort(begin, num_blocks, sizeof(Event), in_time);
        for (Py_ssize_t i = 0; i < num_blocks; i++)
            end[i] = (Event){last[begin[i].index], 0, begin[i].index};
        qsort(end, num_blocks, sizeof(Event), in_time);
        for (Py_ssize_t i = 0; i < num_blocks; i++) {
            for (; ended < num_blocks && end[ended].when < begin[i].when; ended++) {
                int64_t low = offset[end[ended].index], rows = size[end[ended].index];
                give_rows(&gaps, low, low + rows);
                alive -= rows;
            }
            offset[begin[i].index] = take_rows(&gaps, begin[i].size);
            alive += begin[i].size;
            peak = gaps.top > peak ? gaps.top : peak;
            bound = alive > bound ? alive : bound;
        }
    }
    free(begin);
    free(gaps.gap);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_BuildValue("(LL)", (long long)peak, (long long)bound) : do_not_fit();
}
