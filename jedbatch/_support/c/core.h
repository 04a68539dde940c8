/* The hot paths of planning in C: twins of functions in Python, with the same results.
 *
 * Only what CPython's stable ABI has is used, so that one build serves every Python from 3.11 on.
 */

#ifndef JEDBATCH_CORE_H
#define JEDBATCH_CORE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

#define REVISION 29 /* of what functions take and return, as in `_support/native.py` */
#define MAX_BUFFERS 24

typedef struct {
    Py_buffer held[MAX_BUFFERS];
    int count;
} Buffers;

/* Takes a tuple of contiguous arrays whose items have so many bytes; a negative number means that
 * they are written to. Where there is None, the pointer is NULL and the length 0. Returns -1 with
 * an error if they are something else. */
int get_buffers(Buffers *buffers, PyObject *tuple, int count, const int *item_sizes, void **data,
                Py_ssize_t *lengths);
void release_buffers(Buffers *buffers);

/* Raises the error for arrays that do not fit each other; returns NULL. */
PyObject *do_not_fit(void);

/* Writes the edges of a graph, once for neighbours that are equal, given its (type of nodes, results
 * of types, operand_ptr, operands, edge_ptr, makers, readers), and returns how many; -1 if arrays do
 * not fit each other, or with an error without memory. */
Py_ssize_t write_edges(void *const *data, const Py_ssize_t *lengths);

PyObject *make_fast_path(PyObject *module, PyObject *args);
int init_cells(PyObject *module);
int init_fast_path(PyObject *module);
PyObject *tree_keys(PyObject *module, PyObject *args);
PyObject *instance_tokens(PyObject *module, PyObject *args);
PyObject *longest_paths(PyObject *module, PyObject *given);
PyObject *longest_chains(PyObject *module, PyObject *given);
PyObject *schedule(PyObject *module, PyObject *args);
PyObject *join(PyObject *module, PyObject *args);
PyObject *sort_batches(PyObject *module, PyObject *given);
PyObject *rank_batches(PyObject *module, PyObject *args);
PyObject *begin_step(PyObject *module, PyObject *args);
PyObject *follow_step(PyObject *module, PyObject *args);
PyObject *write_table(PyObject *module, PyObject *args);
PyObject *write_graph(PyObject *module, PyObject *args);
PyObject *write_copies(PyObject *module, PyObject *args);
PyObject *xla_calls(PyObject *module, PyObject *nothing);

#endif
