/* Whether containers hold what they held before: the twin of `_record/identity/mutation.py`. */

#include "watched.h"

/* Whether a dict has these keys and values, in this order. */
static int
is_same_dict(PyObject *x, PyObject *items)
{
    Py_ssize_t position = 0, i = 0, length = PyTuple_Size(items);
    PyObject *key, *value;
    if (2 * PyDict_Size(x) != length)
        return 0;
    while (PyDict_Next(x, &position, &key, &value)) {
        if (key != PyTuple_GetItem(items, i) || value != PyTuple_GetItem(items, i + 1))
            return 0;
        i += 2;
    }
    return i == length;
}

static int
is_same_list(PyObject *x, PyObject *items)
{
    Py_ssize_t length = PyTuple_Size(items);
    if (PyList_Size(x) != length)
        return 0;
    for (Py_ssize_t i = 0; i < length; i++)
        if (PyList_GetItem(x, i) != PyTuple_GetItem(items, i))
            return 0;
    return 1;
}

/* Whether slots of an object, read by their descriptors, have these contents. */
static int
is_same_object(PyObject *x, PyObject *slots, PyObject *items)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(slots); i++) {
        PyObject *slot = PyTuple_GetItem(slots, i);
        descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(slot), Py_tp_descr_get);
        PyObject *value = get == NULL ? NULL : get(slot, x, (PyObject *)Py_TYPE(x));
        if (value == NULL)
            PyErr_Clear(); /* it has been emptied */
        int is_same = value != NULL && value == PyTuple_GetItem(items, i);
        Py_XDECREF(value);
        if (!is_same)
            return 0;
    }
    return 1;
}

int
hold_the_same(PyObject *holders)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(holders); i++) {
        PyObject *x = PyTuple_GetItem(holders, i), *slots, *items;
        if (x == NULL || !PyTuple_Check(x) || PyTuple_Size(x) != 3)
            return 0;
        slots = PyTuple_GetItem(x, 1);
        items = PyTuple_GetItem(x, 2);
        x = PyTuple_GetItem(x, 0);
        int is_same = PyTuple_Check(slots) ? is_same_object(x, slots, items)
            : PyDict_Check(x)              ? is_same_dict(x, items)
                                           : PyList_Check(x) && is_same_list(x, items);
        if (!is_same)
            return 0;
    }
    return 1;
}
