/* Where slots are in objects. */

#include "slots.h"

/* A slot is where its descriptor puts an object. */
Py_ssize_t
find_slot(PyObject *class, const char *name)
{
    Py_ssize_t at = -1;
    PyObject *descriptor = PyObject_GetAttrString(class, name), *mark = PyList_New(0), *x = NULL;
    PyObject *basic_size = PyObject_GetAttrString(class, "__basicsize__");
    descrsetfunc set = NULL;
    if (descriptor != NULL)
        set = (descrsetfunc)PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_set);
    if (set != NULL && mark != NULL && basic_size != NULL)
        x = PyType_GenericAlloc((PyTypeObject *)class, 0);
    if (x != NULL && set(descriptor, x, mark) == 0) {
        Py_ssize_t size = PyLong_AsSsize_t(basic_size), step = sizeof(PyObject *);
        for (Py_ssize_t i = sizeof(PyObject); i + step <= size; i += step)
            at = *slot(x, i) == mark ? i : at;
    }
    if (at < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%R has no slot `%s`", class, name);
    Py_XDECREF(descriptor);
    Py_XDECREF(basic_size);
    Py_XDECREF(mark);
    Py_XDECREF(x);
    return at;
}
