/* Whether an instance records the same again: the twin of `_control_flow/steps.py`, which says what
 * a table of steps holds.
 */

#include <string.h>

#include "ints.h"

enum { CALLS, REFERENCES, GROUPS, COUNTER, NUM_SIZES }; /* the columns of a recording */
enum { NODES, READS, INPUTS, VALUES };                  /* its sizes */

/* A row of the table of steps. */
typedef struct {
    int64_t before[NUM_SIZES], last[NUM_SIZES], counts[NUM_SIZES], now[NUM_SIZES], read;
} Step;

/* The columns of a recording, its sizes and the step of a fibre, in `buffers`; NULL with an error. */
static Step *
take(PyObject *given, PyObject *tables, Py_ssize_t fiber, Ints **columns, int64_t *sizes,
     Buffers *buffers)
{
    static const int item_sizes[1] = {-8};
    void *data[1];
    Py_ssize_t length;
    if (!PyArg_ParseTuple(given, "O!O!O!O!", ints_type, &columns[CALLS], ints_type,
                          &columns[REFERENCES], ints_type, &columns[GROUPS], ints_type,
                          &columns[COUNTER]))
        return NULL;
    if (get_buffers(buffers, tables, 1, item_sizes, data, &length) < 0)
        return NULL;
    Py_ssize_t width = sizeof(Step) / sizeof(int64_t);
    if (fiber < 0 || fiber >= length / width || columns[COUNTER]->count < 1) {
        release_buffers(buffers);
        PyErr_SetString(PyExc_ValueError, "there is no such step");
        return NULL;
    }
    for (int i = 0; i < COUNTER; i++)
        sizes[i] = columns[i]->count;
    sizes[VALUES] = columns[COUNTER]->items[0];
    return (Step *)data[0] + fiber;
}

/* begin_step((types of nodes, references, groups, counter), (table,), fibre): notes that a fibre goes
 * on. */
PyObject *
begin_step(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given, *tables;
    Py_ssize_t fiber;
    Ints *columns[NUM_SIZES];
    int64_t sizes[NUM_SIZES];
    Buffers buffers = {0};
    if (!PyArg_ParseTuple(args, "O!On", &PyTuple_Type, &given, &tables, &fiber))
        return NULL;
    Step *step = take(given, tables, fiber, columns, sizes, &buffers);
    if (step == NULL)
        return NULL;
    memcpy(step->now, sizes, sizeof(sizes));
    release_buffers(&buffers);
    return Py_NewRef(Py_None);
}

/* Whether so many items from one place on are those from another one on. */
static int
is_same(const Ints *column, int64_t a, int64_t b, int64_t count)
{
    return a >= 0 && b >= 0 && a + count <= column->count && b + count <= column->count &&
           (count == 0 || memcmp(column->items + a, column->items + b, count * sizeof(int64_t)) == 0);
}

static int
is_alike(Ints *const *columns, const Step *step)
{
    const int64_t *before = step->before, *last = step->last, *now = step->now;
    int64_t count = step->counts[READS], num_values = step->counts[VALUES];
    const Ints *references = columns[REFERENCES];
    if (!is_same(columns[CALLS], last[NODES], now[NODES], step->counts[NODES]) ||
        !is_same(columns[GROUPS], last[INPUTS], now[INPUTS], step->counts[INPUTS]) ||
        last[READS] < 0 || now[READS] < last[READS] || now[READS] + count > references->count)
        return 0;
    const int64_t *x = references->items + now[READS], *y = references->items + last[READS];
    int same = 1;
    for (int64_t i = 0; same && i < count; i++) {
        if (x[i] >= now[VALUES])
            same = x[i] - now[VALUES] == y[i] - last[VALUES];
        else if (x[i] >= last[VALUES] && x[i] < last[VALUES] + num_values)
            same = x[i] - last[VALUES] == y[i] - before[VALUES];
        else if (x[i] < -now[INPUTS])
            same = x[i] + now[INPUTS] == y[i] + last[INPUTS];
        else /* and no value of the step before, which would move on */
            same = x[i] == y[i] && (y[i] < before[VALUES] || y[i] >= before[VALUES] + num_values);
    }
    return same;
}

/* Notes that a step ends, given the value that it needs; returns whether it is the same as the step
 * before. */
static int
end_step(Ints *const *columns, Step *step, int64_t value)
{
    int64_t sizes[NUM_SIZES], counts[NUM_SIZES], read = value - step->now[VALUES];
    for (int i = 0; i < COUNTER; i++)
        sizes[i] = columns[i]->count;
    sizes[VALUES] = columns[COUNTER]->items[0];
    int same = read == step->read;
    for (int i = 0; i < NUM_SIZES; i++) {
        counts[i] = sizes[i] - step->now[i];
        same = same && step->before[i] >= 0 && counts[i] >= 0 && counts[i] == step->counts[i];
    }
    same = same && is_alike(columns, step);
    int64_t more = step->counts[VALUES] - counts[VALUES]; /* before what comes again */
    memcpy(step->before, step->last, sizeof(counts));
    step->before[VALUES] += more > 0 ? more : 0;
    memcpy(step->last, step->now, sizeof(counts));
    memcpy(step->counts, counts, sizeof(counts));
    memcpy(step->now, sizes, sizeof(counts));
    step->read = read;
    return same;
}

/* follow_step((types of nodes, references, groups, counter), (table,), fibre, value): whether the step
 * that ends is the same as the one before; the next one begins. */
PyObject *
follow_step(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given, *tables;
    Py_ssize_t fiber;
    long long value;
    Ints *columns[NUM_SIZES];
    int64_t sizes[NUM_SIZES];
    Buffers buffers = {0};
    if (!PyArg_ParseTuple(args, "O!OnL", &PyTuple_Type, &given, &tables, &fiber, &value))
        return NULL;
    Step *step = take(given, tables, fiber, columns, sizes, &buffers);
    if (step == NULL)
        return NULL;
    int same = end_step(columns, step, value);
    release_buffers(&buffers);
    return PyBool_FromLong(same);
}
