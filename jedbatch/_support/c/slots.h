/* Slots of objects of classes in Python, read without their descriptors. */

#ifndef JEDBATCH_SLOTS_H
#define JEDBATCH_SLOTS_H

#include "core.h"

static inline PyObject **
slot(PyObject *x, Py_ssize_t at)
{
    return (PyObject **)((char *)x + at);
}

/* Where a slot is in the objects of a class, in bytes. -1 with an error if it has no such slot. */
Py_ssize_t find_slot(PyObject *class, const char *name);

#endif
