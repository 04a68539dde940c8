/* `Ints`: what recording writes for every node and operand. It has what lists have, as far as
 * recorders use it; parts of it are lists. */

#include <stdlib.h>
#include <string.h>

#include "ints.h"

PyTypeObject *ints_type;

/* Memory of lists that are gone, for those of the next recording, which grow as long as these: to
 * grow step by step copies all of it, and fresh memory is mapped page by page. */
#define NUM_SPARE 4
#define FIRST_ROOM 512
#define MAX_SPARE_ROOM (1 << 16)

static struct {
    int64_t *items;
    Py_ssize_t room;
} spare[NUM_SPARE];

/* Swaps the memory of a list for a spare one with some room, the largest; 0 if there is none. */
static int
take_spare(Ints *ints, Py_ssize_t room)
{
    int best = 0;
    for (int i = 1; i < NUM_SPARE; i++)
        if (spare[i].room > spare[best].room)
            best = i;
    if (spare[best].room < room)
        return 0;
    int64_t *items = spare[best].items;
    Py_ssize_t own = ints->room;
    memcpy(items, ints->items, (size_t)ints->count * sizeof(int64_t));
    ints->room = spare[best].room;
    spare[best].items = ints->items;
    spare[best].room = own;
    ints->items = items;
    return 1;
}

/* Keeps memory in place of the least that is kept, or lets go of it. */
static void
keep_spare(int64_t *items, Py_ssize_t room)
{
    int least = 0;
    for (int i = 1; i < NUM_SPARE; i++)
        if (spare[i].room < spare[least].room)
            least = i;
    if (room <= MAX_SPARE_ROOM && room > spare[least].room) {
        int64_t *before = spare[least].items;
        spare[least].items = items;
        spare[least].room = room;
        items = before;
    }
    free(items);
}

static int
make_room(Ints *ints, Py_ssize_t more)
{
    if (more <= ints->room - ints->count)
        return 0;
    Py_ssize_t room = ints->room > FIRST_ROOM ? ints->room : FIRST_ROOM;
    while (room - ints->count < more && room <= PY_SSIZE_T_MAX / 32)
        room *= 2;
    if (ints->room >= FIRST_ROOM && take_spare(ints, room))
        return 0;
    int64_t *items = NULL;
    if (room - ints->count >= more)
        items = realloc(ints->items, (size_t)room * sizeof(int64_t));
    if (items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    ints->items = items;
    ints->room = room;
    return 0;
}

int
append_int(Ints *ints, int64_t item)
{
    if (ints->count == ints->room && make_room(ints, 1) < 0)
        return -1;
    ints->items[ints->count++] = item;
    return 0;
}

int
append_ints(Ints *ints, const int64_t *items, Py_ssize_t count)
{
    if (make_room(ints, count) < 0)
        return -1;
    if (count > 0)
        memcpy(ints->items + ints->count, items, (size_t)count * sizeof(int64_t));
    ints->count += count;
    return 0;
}

static PyObject *
append(PyObject *object, PyObject *item)
{
    long long number = PyLong_AsLongLong(item);
    if ((number == -1 && PyErr_Occurred()) || append_int((Ints *)object, number) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

/* Adds the ints of anything that can be iterated over; nothing if one of them is no int. */
static int
extend_by(Ints *ints, PyObject *items)
{
    PyObject *list = PySequence_List(items);
    if (list == NULL)
        return -1;
    Py_ssize_t before = ints->count, count = PyList_Size(list);
    int failed = make_room(ints, count) < 0;
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        long long number = item == NULL ? -1 : PyLong_AsLongLong(item);
        failed = (number == -1 && PyErr_Occurred()) || append_int(ints, number) < 0;
    }
    if (failed && ints->count > before)
        ints->count = before;
    Py_DECREF(list);
    return failed ? -1 : 0;
}

static PyObject *
extend(PyObject *object, PyObject *items)
{
    return extend_by((Ints *)object, items) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
extend_in_place(PyObject *object, PyObject *items)
{
    return extend_by((Ints *)object, items) < 0 ? NULL : Py_NewRef(object);
}

static PyObject *
clear(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    ((Ints *)object)->count = 0;
    return Py_NewRef(Py_None);
}

static Py_ssize_t
length(PyObject *object)
{
    return ((Ints *)object)->count;
}

static PyObject *
item(PyObject *object, Py_ssize_t i)
{
    Ints *ints = (Ints *)object;
    if (i < 0 || i >= ints->count) {
        PyErr_SetString(PyExc_IndexError, "index out of range");
        return NULL;
    }
    return PyLong_FromLongLong(ints->items[i]);
}

/* The place of an item, counted from the front; -1 with an error if there is none. */
static Py_ssize_t
place_of(const Ints *ints, PyObject *key)
{
    Py_ssize_t i = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (i == -1 && PyErr_Occurred())
        return -1;
    i += i < 0 ? ints->count : 0;
    if (i < 0 || i >= ints->count) {
        PyErr_SetString(PyExc_IndexError, "index out of range");
        return -1;
    }
    return i;
}

static PyObject *
subscript(PyObject *object, PyObject *key)
{
    Ints *ints = (Ints *)object;
    Py_ssize_t start, stop, step;
    if (!PySlice_Check(key)) {
        Py_ssize_t i = place_of(ints, key);
        return i < 0 ? NULL : item(object, i);
    }
    if (PySlice_Unpack(key, &start, &stop, &step) < 0)
        return NULL;
    Py_ssize_t count = PySlice_AdjustIndices(ints->count, &start, &stop, step);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = item(object, start + i * step);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, i, number);
    }
    return list;
}

/* Sets an item, or deletes what follows one. */
static int
set_subscript(PyObject *object, PyObject *key, PyObject *value)
{
    Ints *ints = (Ints *)object;
    if (value != NULL && !PySlice_Check(key)) {
        long long number = PyLong_AsLongLong(value);
        Py_ssize_t i = number == -1 && PyErr_Occurred() ? -1 : place_of(ints, key);
        if (i >= 0)
            ints->items[i] = number;
        return i < 0 ? -1 : 0;
    }
    Py_ssize_t start, stop, step;
    if (value == NULL && PySlice_Check(key)) {
        if (PySlice_Unpack(key, &start, &stop, &step) < 0)
            return -1;
        PySlice_AdjustIndices(ints->count, &start, &stop, step);
        if (step == 1 && stop == ints->count) {
            ints->count = start;
            return 0;
        }
    }
    PyErr_SetString(PyExc_TypeError, "only single ints can be set, and the last ones be deleted");
    return -1;
}

static PyObject *
new(PyTypeObject *type, PyObject *args, PyObject *options)
{
    PyObject *items = NULL;
    if (!PyArg_ParseTuple(args, "|O", &items) || (options != NULL && PyDict_Size(options) > 0)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "Ints takes no keyword arguments");
        return NULL;
    }
    PyObject *object = PyType_GenericAlloc(type, 0);
    if (object != NULL && items != NULL && extend_by((Ints *)object, items) < 0)
        Py_CLEAR(object);
    return object;
}

static void
dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    keep_spare(((Ints *)object)->items, ((Ints *)object)->room);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"append", append, METH_O, NULL},
    {"extend", extend, METH_O, NULL},
    {"clear", clear, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, length},
    {Py_sq_item, item},
    {Py_sq_inplace_concat, extend_in_place},
    {Py_mp_length, length},
    {Py_mp_subscript, subscript},
    {Py_mp_ass_subscript, set_subscript},
    {0, NULL},
};

static PyType_Spec spec = {
    "jedbatch._support.native_core.Ints", sizeof(Ints), 0, Py_TPFLAGS_DEFAULT, slots,
};

int
init_ints(PyObject *module)
{
    ints_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return ints_type == NULL ? -1 : PyModule_AddObjectRef(module, "Ints", (PyObject *)ints_type);
}
