/* The module `jedbatch._support.native_core` (see `core.h`). */

#include <stdlib.h>
#include <string.h>

#include "ints.h"
#include "watched.h"

int
get_buffers(Buffers *buffers, PyObject *tuple, int count, const int *item_sizes, void **data,
            Py_ssize_t *lengths)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of %d arrays", count);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *x = PyTuple_GetItem(tuple, i);
        data[i] = NULL;
        lengths[i] = 0;
        if (x == Py_None)
            continue;
        Py_buffer *held = &buffers->held[buffers->count];
        int size = item_sizes[i] < 0 ? -item_sizes[i] : item_sizes[i];
        int flags = PyBUF_C_CONTIGUOUS | (item_sizes[i] < 0 ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(x, held, flags) < 0)
            goto failed;
        buffers->count++;
        if (held->itemsize != size) {
            PyErr_Format(PyExc_TypeError, "array %d has items of %zd bytes; expected %d", i,
                         held->itemsize, size);
            goto failed;
        }
        data[i] = held->buf;
        lengths[i] = held->len / held->itemsize;
    }
    return 0;
failed:
    release_buffers(buffers);
    return -1;
}

void
release_buffers(Buffers *buffers)
{
    while (buffers->count > 0)
        PyBuffer_Release(&buffers->held[--buffers->count]);
}

PyObject *
do_not_fit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays do not fit each other");
    return NULL;
}

/* copy_ints(numbers, (array,)): writes the last of a list of ints, or `Ints`, to an array of int64
 * of as many. */
static PyObject *
copy_ints(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *numbers, *given;
    if (!PyArg_ParseTuple(args, "OO", &numbers, &given))
        return NULL;
    Ints *ints = Py_TYPE(numbers) == ints_type ? (Ints *)numbers : NULL;
    if (ints == NULL && !PyList_Check(numbers)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of ints");
        return NULL;
    }
    static const int item_sizes[1] = {-8};
    Buffers buffers = {0};
    void *data;
    Py_ssize_t length;
    if (get_buffers(&buffers, given, 1, item_sizes, &data, &length) < 0)
        return NULL;
    int64_t *array = data;
    Py_ssize_t first = (ints == NULL ? PyList_Size(numbers) : ints->count) - length;
    if (first < 0)
        PyErr_SetString(PyExc_ValueError, "the array is longer than the list");
    else if (ints != NULL && length > 0)
        memcpy(array, ints->items + first, (size_t)length * sizeof(int64_t));
    for (Py_ssize_t i = 0; ints == NULL && i < length && !PyErr_Occurred(); i++) {
        PyObject *number = PyList_GetItem(numbers, first + i);
        array[i] = number == NULL ? 0 : PyLong_AsLongLong(number);
    }
    release_buffers(&buffers);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* is_off(): whether the environment says that Python is to run, as in `_support/native.py`. */
static PyObject *
is_off(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    const char *value = getenv("JEDBATCH_NATIVE");
    return PyBool_FromLong(value != NULL && strcmp(value, "0") == 0);
}

static PyMethodDef functions[] = {
    {"copy_ints", copy_ints, METH_VARARGS, NULL},
    {"fast_path", make_fast_path, METH_VARARGS, NULL},
    {"is_off", is_off, METH_NOARGS, NULL},
    {"longest_paths", longest_paths, METH_O, NULL},
    {"longest_chains", longest_chains, METH_O, NULL},
    {"schedule", schedule, METH_VARARGS, NULL},
    {"instance_tokens", instance_tokens, METH_VARARGS, NULL},
    {"join", join, METH_VARARGS, NULL},
    {"tree_keys", tree_keys, METH_VARARGS, NULL},
    {"rank_batches", rank_batches, METH_VARARGS, NULL},
    {"begin_step", begin_step, METH_VARARGS, NULL},
    {"follow_step", follow_step, METH_VARARGS, NULL},
    {"sort_batches", sort_batches, METH_O, NULL},
    {"write_copies", write_copies, METH_VARARGS, NULL},
    {"write_graph", write_graph, METH_VARARGS, NULL},
    {"write_table", write_table, METH_VARARGS, NULL},
    {"xla_calls", xla_calls, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "jedbatch._support.native_core", NULL, -1, functions, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC
PyInit_native_core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (init_ints(module) < 0 || init_cells(module) < 0 ||
                           init_fast_path(module) < 0 ||
                           PyModule_AddIntConstant(module, "REVISION", REVISION) < 0))
        Py_CLEAR(module);
    return module;
}
