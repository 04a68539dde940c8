/* `Ints`: a list of ints of 64 bits, one after the other in memory. */

#ifndef JEDBATCH_INTS_H
#define JEDBATCH_INTS_H

#include "core.h"

typedef struct {
    PyObject_HEAD
    int64_t *items;
    Py_ssize_t count, room;
} Ints;

extern PyTypeObject *ints_type;

int init_ints(PyObject *module);
int append_int(Ints *ints, int64_t item); /* -1 with an error without memory */
int append_ints(Ints *ints, const int64_t *items, Py_ssize_t count); /* the same */

#endif
