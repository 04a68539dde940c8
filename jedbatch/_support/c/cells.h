/* Cells as functions, and the recording of their calls (see `cells.c` and `fast_path.c`). */

#ifndef JEDBATCH_CELLS_H
#define JEDBATCH_CELLS_H

#include "core.h"

/* Calls a recorder's function of (cell, args, options) with so many arguments, then those with
 * `names`, a tuple or NULL. */
PyObject *call_recorder(PyObject *record, PyObject *cell, PyObject *const *args, Py_ssize_t count,
                        PyObject *names);

/* Notes where recorders of a class have what calls are recorded by: -1 with an error. */
int note_recorder(PyObject *recorder);

/* Whether a recorder's `call_cell` is the method of a fast path. */
int is_fast_path(PyObject *call_cell);

/* Records a call of a cell by a fast path; arguments as above. */
PyObject *record_call(PyObject *fast_path, PyObject *cell, PyObject *const *args, Py_ssize_t count,
                      PyObject *names);

#endif
