/* Cells as functions, and who records in a thread: the twins of `call` and of `_Recording` in
 * `_record/cell.py`.
 *
 * A call while nothing is recorded calls the function; else the recorder records it, at once if it
 * is one of `fast_path.c`. Arguments come as CPython's vectorcall has them, so that a recorded call
 * makes neither a tuple nor a dict. The protocol is the same from CPython 3.8 on; 3.12 made it part
 * of the stable ABI.
 */

#include <stddef.h>

#include "core.h"
#include <structmember.h>

#include "cells.h"
#include "slots.h"

#define HAS_VECTORCALL (1UL << 11)
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))

static PyObject *name_recorder, *name_call_cell, *name_qualified, *method_type, *reduce;

typedef PyObject *(*Vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);

typedef struct {
    PyObject_HEAD
    PyObject *fn, *cell, *recording; /* whose `recorder` is that of this thread, or None */
    PyObject *attributes, *weak;
    Vectorcall vectorcall;
} CellFunction;

static PyTypeObject *cell_function_type, *recording_type;
static Py_tss_t *recorder_key; /* of the recorder of a thread, a reference; NULL for none */
/* The class of recorders met last, and where its slot `call_cell` is in bytes. */
static PyTypeObject *recorder_type;
static Py_ssize_t call_cell_at;

static PyObject *
get_recorder(PyObject *recording, void *nothing)
{
    (void)recording;
    (void)nothing;
    PyObject *recorder = PyThread_tss_get(recorder_key);
    return Py_NewRef(recorder == NULL ? Py_None : recorder);
}

static int
set_recorder(PyObject *recording, PyObject *recorder, void *nothing)
{
    (void)recording;
    (void)nothing;
    if (recorder == NULL) {
        PyErr_SetString(PyExc_AttributeError, "`recorder` cannot be deleted; set it to None");
        return -1;
    }
    PyObject *before = PyThread_tss_get(recorder_key);
    PyObject *after = recorder == Py_None ? NULL : Py_NewRef(recorder);
    if (PyThread_tss_set(recorder_key, after) != 0) {
        Py_XDECREF(after);
        PyErr_NoMemory();
        return -1;
    }
    Py_XDECREF(before);
    return 0;
}

static PyObject *
recording_name(PyObject *recording, PyObject *nothing)
{
    (void)recording;
    (void)nothing;
    return PyUnicode_FromString("recording"); /* pickled as that of the process that reads it */
}

int
note_recorder(PyObject *recorder)
{
    if (recorder_type == Py_TYPE(recorder))
        return 0;
    Py_ssize_t at = find_slot((PyObject *)Py_TYPE(recorder), "call_cell");
    if (at < 0)
        return -1;
    PyTypeObject *before = recorder_type;
    recorder_type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(recorder));
    call_cell_at = at;
    Py_XDECREF((PyObject *)before);
    return 0;
}

/* The recorder of this thread, None if there is none; a new reference, or NULL with an error. */
static PyObject *
recorder_of(CellFunction *function)
{
    if (Py_TYPE(function->recording) == recording_type)
        return get_recorder(NULL, NULL);
    return PyObject_GetAttr(function->recording, name_recorder);
}

/* What a recorder records calls by; a new reference, or NULL with an error. */
static PyObject *
call_cell_of(PyObject *recorder)
{
    PyObject *record = Py_TYPE(recorder) == recorder_type ? *slot(recorder, call_cell_at) : NULL;
    return record != NULL ? Py_NewRef(record) : PyObject_GetAttr(recorder, name_call_cell);
}

/* A tuple of arguments, and a dict of those with names; NULL with an error. */
static PyObject *
packed(PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject **options)
{
    PyObject *tuple = PyTuple_New(count);
    *options = tuple == NULL ? NULL : PyDict_New();
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++)
        PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; *options != NULL && names != NULL && i < PyTuple_Size(names); i++)
        if (PyDict_SetItem(*options, PyTuple_GetItem(names, i), args[count + i]) < 0)
            Py_CLEAR(*options);
    if (*options == NULL)
        Py_CLEAR(tuple);
    return tuple;
}

static PyObject *
call_function(PyObject *fn, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *options, *tuple = packed(args, count, names, &options);
    PyObject *result = tuple == NULL ? NULL : PyObject_Call(fn, tuple, options);
    Py_XDECREF(tuple);
    Py_XDECREF(options);
    return result;
}

PyObject *
call_recorder(PyObject *record, PyObject *cell, PyObject *const *args, Py_ssize_t count,
              PyObject *names)
{
    PyObject *options, *tuple = packed(args, count, names, &options), *result = NULL;
    if (tuple != NULL)
        result = PyObject_CallFunctionObjArgs(record, cell, tuple, options, NULL);
    Py_XDECREF(tuple);
    Py_XDECREF(options);
    return result;
}

static PyObject *
call_with(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    CellFunction *self = (CellFunction *)object;
    Py_ssize_t count = (Py_ssize_t)(flags & ~ARGUMENTS_OFFSET);
    PyObject *recorder = recorder_of(self), *result = NULL;
    if (recorder == NULL)
        return NULL;
    if (recorder == Py_None)
        result = call_function(self->fn, args, count, names);
    else {
        PyObject *record = call_cell_of(recorder);
        if (record != NULL && is_fast_path(record))
            result = record_call(PyCFunction_GetSelf(record), self->cell, args, count, names);
        else if (record != NULL)
            result = call_recorder(record, self->cell, args, count, names);
        Py_XDECREF(record);
    }
    Py_DECREF(recorder);
    return result;
}

/* The same with arguments in a tuple and a dict. */
static PyObject *
call(PyObject *object, PyObject *args, PyObject *options)
{
    CellFunction *self = (CellFunction *)object;
    PyObject *recorder = recorder_of(self), *result = NULL;
    if (recorder == Py_None)
        result = PyObject_Call(self->fn, args, options);
    else if (recorder != NULL) {
        PyObject *record = call_cell_of(recorder);
        options = options == NULL ? PyDict_New() : Py_NewRef(options);
        if (record != NULL && options != NULL)
            result = PyObject_CallFunctionObjArgs(record, self->cell, args, options, NULL);
        Py_XDECREF(options);
        Py_XDECREF(record);
    }
    Py_XDECREF(recorder);
    return result;
}

/* CellFunction(fn, cell, recording, method type, reduce): see above; `method type` binds a function
 * to an object, and `reduce` says how one is pickled. */
static PyObject *
new(PyTypeObject *type, PyObject *args, PyObject *options)
{
    PyObject *fn, *cell, *recording, *method, *reduced;
    if (!PyArg_ParseTuple(args, "OOOOO", &fn, &cell, &recording, &method, &reduced))
        return NULL;
    if (options != NULL && PyDict_Size(options) > 0) {
        PyErr_SetString(PyExc_TypeError, "CellFunction takes no keyword arguments");
        return NULL;
    }
    CellFunction *self = (CellFunction *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->fn = Py_NewRef(fn);
    self->cell = Py_NewRef(cell);
    self->recording = Py_NewRef(recording);
    self->vectorcall = call_with;
    if (method_type == NULL) {
        method_type = Py_NewRef(method);
        reduce = Py_NewRef(reduced);
    }
    return (PyObject *)self;
}

static PyObject *
bind(PyObject *object, PyObject *instance, PyObject *class)
{
    (void)class;
    if (instance == NULL || instance == Py_None)
        return Py_NewRef(object);
    return PyObject_CallFunctionObjArgs(method_type, object, instance, NULL);
}

static PyObject *
represent(PyObject *object)
{
    PyObject *name = PyObject_GetAttr(object, name_qualified), *text = NULL;
    if (name != NULL)
        text = PyUnicode_FromFormat("<function %S at %p>", name, (void *)object);
    Py_XDECREF(name);
    return text;
}

static PyObject *
reduced_form(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    return PyObject_CallFunctionObjArgs(reduce, object, NULL);
}

/* A copy of a function is that function. */
static PyObject *
copied(PyObject *object, PyObject *given)
{
    (void)given;
    return Py_NewRef(object);
}

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    CellFunction *self = (CellFunction *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->fn);
    Py_VISIT(self->cell);
    Py_VISIT(self->recording);
    Py_VISIT(self->attributes);
    return 0;
}

static int
clear(PyObject *object)
{
    CellFunction *self = (CellFunction *)object;
    Py_CLEAR(self->attributes);
    return 0;
}

static void
dealloc(PyObject *object)
{
    CellFunction *self = (CellFunction *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weak != NULL)
        PyObject_ClearWeakRefs(object);
    Py_XDECREF(self->fn);
    Py_XDECREF(self->cell);
    Py_XDECREF(self->recording);
    Py_XDECREF(self->attributes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"__copy__", copied, METH_NOARGS, NULL},
    {"__deepcopy__", copied, METH_O, NULL},
    {"__reduce__", reduced_form, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(CellFunction, attributes), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CellFunction, vectorcall), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CellFunction, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef computed[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},           {Py_tp_call, call},       {Py_tp_descr_get, bind},
    {Py_tp_repr, represent},    {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},       {Py_tp_methods, methods}, {Py_tp_members, members},
    {Py_tp_getset, computed},   {0, NULL},
};

static PyType_Spec spec = {
    "jedbatch._support.native_core.CellFunction", sizeof(CellFunction), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL, slots,
};

static PyMethodDef recording_methods[] = {
    {"__reduce__", recording_name, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef recording_attributes[] = {
    {"recorder", get_recorder, set_recorder, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot recording_slots[] = {
    {Py_tp_methods, recording_methods},
    {Py_tp_getset, recording_attributes},
    {0, NULL},
};

static PyType_Spec recording_spec = {
    "jedbatch._record.cell.Recording", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, recording_slots,
};

int
init_cells(PyObject *module)
{
    recorder_key = PyThread_tss_alloc();
    if (recorder_key == NULL || PyThread_tss_create(recorder_key) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    recording_type = (PyTypeObject *)PyType_FromSpec(&recording_spec);
    if (recording_type == NULL ||
        PyModule_AddObjectRef(module, "Recording", (PyObject *)recording_type) < 0)
        return -1;
    name_recorder = PyUnicode_InternFromString("recorder");
    name_call_cell = PyUnicode_InternFromString("call_cell");
    name_qualified = PyUnicode_InternFromString("__qualname__");
    cell_function_type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (cell_function_type == NULL || PyErr_Occurred())
        return -1;
    return PyModule_AddObjectRef(module, "CellFunction", (PyObject *)cell_function_type);
}
