/* Recording calls of cells: the twin of `_record/calls/fast_path.py`, which says what is done and why.
 *
 * A call is looked at once: every argument gives words (what describes it) and references. The words
 * of a call that was met before in this recording lead to its call spec at once (see `memo.h`), those
 * of another one by the key that Python has for them.
 *
 * A call that this does not know, and arguments that Python alone can describe, are left to the
 * Python of the same name; nothing is written before it is known that the call is recorded here, but
 * inputs, which do no harm if nobody reads them.
 *
 * Python code may run wherever objects are made or let go, and may change the dictionaries. So
 * whatever is used after that is held by a reference of its own.
 */

#include <stdlib.h>
#include <string.h>

#include "cells.h"
#include "ints.h"
#include "memo.h"
#include "slots.h"
#include "watched.h"

/* A tuple of results that was made for the instance at hand, borrowed from `kept`. */
typedef struct {
    PyObject *results;
    Way *way;
} Made;

typedef struct {
    PyObject_HEAD
    PyObject *recorder, *result, *shared, *cell, *known, *computed, *kept, *numbers, *arrays;
    PyObject *nodes, *units, *ndarray, *same, *watched, *calls, *cells;
    PyObject *call_specs, *references, *input_group, *counter; /* Ints; how many results there are */
    PyObject *input_value, *flatten, *python; /* `flatten` a pytree by one level */
    PyObject *of_ints;  /* what `numbers` has for ints, once it has it */
    /* Where slots are in objects of these classes, in bytes. */
    Py_ssize_t trace_at, index_at, type_at;
    Py_ssize_t result_size, weak_at; /* of objects of the class of results; where weak references are */
    Made *made;
    size_t num_made, room_made;
    Ways ways;
    KnownObjects objects; /* of this instance */
} FastPath;

static PyTypeObject *fast_path_type;
static PyObject *name_results, *name_node_type, *name_tree, *name_unit, *name_made_values;
static PyObject *name_described_cell, *name_shape, *name_dtype, *name_copy, *name_symbol, *name_unflatten;

/* What a call is made of, as far as it has been looked at: pairs of words, one of those below and
 * what it says; objects, by references of its own, of which the addresses are words; and what the
 * node will read, as numbers. */
typedef struct {
    Words words, held, reads;
} Call;

#define FEW_ARGUMENTS 16 /* of a call by Python */

/* What a part of a description is, as in `_record/calls/fast_path.py`: the word of a TOKEN, which is a
 * reference by an object, of STRING, KEYWORD and IDENTITY is the address of an object. */
enum {
    REFERENCE, STRING, LIST, TUPLE, DICT, NODE, SHARED, IDENTITY, KEYWORD, INT, BOOL, FLOAT,
    TOKEN
};

#define MAX_DEPTH 32 /* of containers, and how many names a dict may have */

static void
release(Words *objects)
{
    for (Py_ssize_t i = 0; i < objects->count; i++)
        Py_DECREF((PyObject *)objects->words[i]);
    free_words(objects);
}

/* Adds an object that is taken over, even if this fails. */
static int
push_taken(Words *objects, PyObject *x)
{
    if (x == NULL)
        return -1;
    if (push_word(objects, (uintptr_t)x) < 0) {
        Py_DECREF(x);
        return -1;
    }
    return 0;
}

/* Adds what describes a part of a call. */
static int
describe(Call *call, int kind, uintptr_t word)
{
    return push_word(&call->words, (uintptr_t)kind) < 0 ? -1 : push_word(&call->words, word);
}

/* The same by an object, which is held. */
static int
describe_object(Call *call, int kind, PyObject *x)
{
    if (push_taken(&call->held, Py_NewRef(x)) < 0)
        return -1;
    return describe(call, kind, (uintptr_t)x);
}

/* The same by a string, of which there is one object. */
static int
describe_string(Call *call, int kind, PyObject *x)
{
    Py_INCREF(x);
    PyUnicode_InternInPlace(&x);
    int failed = describe_object(call, kind, x) < 0;
    Py_DECREF(x);
    return failed ? -1 : 0;
}

/* The same by a token: numbers are equal if their values are, others if they are one. */
static int
describe_token(Call *call, PyObject *token)
{
    if (PyLong_CheckExact(token)) {
        int overflow;
        long value = PyLong_AsLongAndOverflow(token, &overflow);
        if (!overflow)
            return describe(call, REFERENCE, (uintptr_t)value);
    }
    return describe_object(call, TOKEN, token);
}

/* Adds references to as many values from number `index` on. */
static int
push_references(Call *call, PyObject *index, Py_ssize_t width)
{
    Py_ssize_t reference = PyLong_AsSsize_t(index);
    if (reference == -1 && PyErr_Occurred())
        return -1;
    for (Py_ssize_t i = 0; i < width; i++)
        if (push_word(&call->reads, (uintptr_t)(reference + i)) < 0)
            return -1;
    return 0;
}

/* The key that Python has for a call; NULL with an error. */
static PyObject *
key_of(FastPath *self, const Words *words)
{
    PyObject *key = PyTuple_New(words->count);
    if (key == NULL)
        return NULL;
    PyTuple_SetItem(key, 0, Py_NewRef((PyObject *)words->words[0])); /* the function's token */
    for (Py_ssize_t i = 1; key != NULL && i < words->count; i += 2) {
        uintptr_t kind = words->words[i], word = words->words[i + 1];
        int is_object = kind == TOKEN || kind == STRING || kind == KEYWORD;
        PyObject *first = PyLong_FromLong(kind == TOKEN ? REFERENCE : (long)kind);
        PyObject *second = is_object ? Py_NewRef((PyObject *)word)
            : kind == IDENTITY
                ? PyObject_CallFunctionObjArgs(self->same, (PyObject *)word, NULL)
                : PyLong_FromLongLong((long long)(intptr_t)word);
        if (first == NULL || second == NULL) {
            Py_XDECREF(first);
            Py_XDECREF(second);
            Py_CLEAR(key);
        } else {
            PyTuple_SetItem(key, i, first);
            PyTuple_SetItem(key, i + 1, second);
        }
    }
    return key;
}

/* Each of these looks at something: 1 if it is described, 0 if it is something else, -1 if it is
 * left to Python, with an error or without. */

static int
look_at_symbol(FastPath *self, Call *call, PyObject *x)
{
    int is_shared = (PyObject *)Py_TYPE(x) == self->shared;
    if ((!is_shared && (PyObject *)Py_TYPE(x) != self->result) ||
        *slot(x, self->trace_at) != self->recorder)
        return 0;
    PyObject *kind = is_shared ? NULL : *slot(x, self->type_at), *index = *slot(x, self->index_at);
    if (index == NULL || (kind == NULL && !is_shared))
        return 0;
    if (is_shared) {
        Py_ssize_t number = PyLong_AsSsize_t(index);
        return PyErr_Occurred() || describe(call, SHARED, (uintptr_t)number) < 0 ? -1 : 1;
    }
    return describe_token(call, kind) < 0 || push_references(call, index, 1) < 0 ? -1 : 1;
}

/* How many values something of a token consists of; -1 with an error. */
static Py_ssize_t
width_of(FastPath *self, PyObject *token)
{
    if (!PyLong_CheckExact(token))
        return 1;
    Py_ssize_t number = PyLong_AsSsize_t(token);
    if (number >= 0 || PyErr_Occurred())
        return PyErr_Occurred() ? -1 : 1;
    PyObject *unit = PyList_GetItem(self->units, -1 - number);
    PyObject *types = unit == NULL ? NULL : PyTuple_GetItem(unit, 0);
    return types == NULL ? -1 : PyTuple_Size(types);
}

/* Adds what is known by its id to what is known by its address: 1 if there is such a thing. An
 * array that was computed becomes an input if it is none yet. */
static int
look_up(FastPath *self, PyObject *x)
{
    PyObject *id = PyLong_FromVoidPtr(x);
    if (id == NULL)
        return -1;
    PyObject *found = PyDict_GetItemWithError(self->known, id);
    if (found == NULL && !PyErr_Occurred() && PyDict_Size(self->computed) > 0 &&
        PyDict_Contains(self->computed, id) == 1) {
        PyObject *symbol = PyObject_CallMethodObjArgs(self->recorder, name_symbol, x, NULL);
        if (symbol == NULL) {
            Py_DECREF(id);
            if (PyErr_ExceptionMatches(PyExc_KeyError) || PyErr_ExceptionMatches(PyExc_ValueError))
                PyErr_Clear(); /* as in Python: the slow path says what is wrong */
            return -1;
        }
        Py_DECREF(symbol);
        found = PyDict_GetItemWithError(self->known, id);
    }
    Py_XINCREF(found);
    Py_DECREF(id);
    if (found == NULL)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *token = PyTuple_GetItem(found, 0), *index = PyTuple_GetItem(found, 1);
    Py_ssize_t width = token == NULL || index == NULL ? -1 : width_of(self, token);
    int failed = width < 0;
    if (!failed)
        failed = add_known_object(&self->objects, x, token, index == Py_None ? NULL : index, width, 1);
    Py_DECREF(found);
    return failed ? -1 : 1;
}

static int
look_at_known(FastPath *self, Call *call, PyObject *x)
{
    Known *known = find_known_object(&self->objects, x);
    if (known == NULL) {
        int found = look_up(self, x);
        if (found <= 0)
            return found;
        known = find_known_object(&self->objects, x);
        if (known == NULL) /* with a token that is no number and no string */
            return -1;
    }
    if (describe_token(call, known->token) < 0)
        return -1;
    return known->index != NULL && push_references(call, known->index, known->width) < 0 ? -1 : 1;
}

/* Looks at a new input: takes over `found`, (input group, token), and `value`; either may be
 * NULL. */
static int
look_at_input(FastPath *self, Call *call, PyObject *found, PyObject *value)
{
    int result = -1;
    Ints *groups = (Ints *)self->input_group;
    if (found != NULL && value != NULL && describe_token(call, PyTuple_GetItem(found, 1)) == 0) {
        Py_ssize_t group = PyLong_AsSsize_t(PyTuple_GetItem(found, 0));
        if (!PyErr_Occurred() && append_int(groups, group) == 0) {
            if (PyList_Append(self->input_value, value) < 0)
                groups->count--;
            else
                result = push_word(&call->reads, (uintptr_t)-groups->count) < 0 ? -1 : 1;
        }
    }
    Py_XDECREF(found);
    Py_XDECREF(value);
    return result;
}

static int
look_at_number(FastPath *self, Call *call, PyObject *x)
{
    int is_int = PyLong_CheckExact(x);
    PyObject *found = is_int ? self->of_ints : NULL;
    if (found == NULL)
        found = PyDict_GetItemWithError(self->numbers, (PyObject *)Py_TYPE(x));
    if (found == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (is_int && self->of_ints == NULL)
        self->of_ints = Py_NewRef(found);
    return look_at_input(self, call, Py_NewRef(found), Py_NewRef(x));
}

/* An array of NumPy is copied, since it may change before it is read. */
static int
look_at_array(FastPath *self, Call *call, PyObject *x)
{
    if ((PyObject *)Py_TYPE(x) != self->ndarray)
        return 0;
    PyObject *shape = PyObject_GetAttr(x, name_shape), *dtype = PyObject_GetAttr(x, name_dtype);
    PyObject *key = shape == NULL || dtype == NULL ? NULL : PyTuple_Pack(2, shape, dtype);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(self->arrays, key), *copy = NULL;
    Py_XINCREF(found);
    if (found != NULL)
        copy = PyObject_CallMethodObjArgs(x, name_copy, NULL);
    int result = look_at_input(self, call, found, copy);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(key);
    return result;
}

/* Looks at what is no container that was put together by hand, the most common first. A shared
 * value may be known by a token, as containers of them are. */
static int
look_at_single(FastPath *self, Call *call, PyObject *x)
{
    int found = (PyObject *)Py_TYPE(x) == self->result ? look_at_symbol(self, call, x) : 0;
    if (found == 0 && (PyLong_CheckExact(x) || PyFloat_CheckExact(x)))
        found = look_at_number(self, call, x);
    found = found == 0 ? look_at_known(self, call, x) : found;
    found = found == 0 ? look_at_symbol(self, call, x) : found;
    found = found == 0 ? look_at_array(self, call, x) : found;
    return found == 0 ? look_at_number(self, call, x) : found;
}

static int look_at(FastPath *self, Call *call, PyObject *x, int depth);

/* Looks at the items of a tuple or list, which may become shorter meanwhile. */
static int
look_at_items(FastPath *self, Call *call, PyObject *x, Py_ssize_t length, int depth)
{
    int is_tuple = PyTuple_Check(x), found = 1;
    for (Py_ssize_t i = 0; found == 1 && i < length; i++) {
        PyObject *part = is_tuple ? PyTuple_GetItem(x, i) : PyList_GetItem(x, i);
        if (part == NULL)
            return -1;
        Py_INCREF(part);
        found = look_at(self, call, part, depth + 1);
        Py_DECREF(part);
    }
    return found;
}

/* Looks at a dict with strings for keys, in the order of these as JAX flattens it; 0 if it has
 * others, or many. */
static int
look_at_dict(FastPath *self, Call *call, PyObject *x, int depth)
{
    PyObject *names[MAX_DEPTH], *name, *value;
    Py_ssize_t position = 0, length = PyDict_Size(x), count = 0;
    if (length > MAX_DEPTH)
        return 0;
    while (PyDict_Next(x, &position, &name, &value)) {
        if (!PyUnicode_CheckExact(name))
            return 0;
        Py_ssize_t i = count++;
        for (; i > 0 && PyUnicode_Compare(names[i - 1], name) > 0; i--)
            names[i] = names[i - 1];
        names[i] = name;
    }
    int found = describe(call, DICT, (uintptr_t)length) < 0 ? -1 : 1;
    for (Py_ssize_t i = 0; found == 1 && i < length; i++)
        if (describe_string(call, STRING, names[i]) < 0)
            found = -1;
        else /* which is held */
            names[i] = (PyObject *)call->held.words[call->held.count - 1];
    for (Py_ssize_t i = 0; found == 1 && i < length; i++) {
        value = PyDict_GetItemWithError(x, names[i]);
        if (value == NULL)
            return -1;
        Py_INCREF(value);
        found = look_at(self, call, value, depth + 1);
        Py_DECREF(value);
    }
    return found;
}

/* Whether the error there is, if any, is one that the slow path explains; it is cleared then. */
static int
is_left_to_python(void)
{
    PyObject *kinds[] = {PyExc_TypeError, PyExc_ValueError, PyExc_KeyError, PyExc_AttributeError,
                         PyExc_RecursionError, PyExc_OverflowError};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
        if (PyErr_Occurred() && PyErr_ExceptionMatches(kinds[i]))
            PyErr_Clear();
    return !PyErr_Occurred();
}

static int
is_compared_by_identity(PyObject *x)
{
    return PyType_GetSlot(Py_TYPE(x), Py_tp_richcompare) ==
           PyType_GetSlot(&PyBaseObject_Type, Py_tp_richcompare);
}

/* The token of containers of a class that carry something besides their parts, a new reference;
 * NULL, without an error if Python has to say. */
static PyObject *
find_node(FastPath *self, PyObject *kind, PyObject *carried)
{
    int is_tuple = PyTuple_CheckExact(carried);
    Py_ssize_t length = is_tuple ? PyTuple_Size(carried) : 1;
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *item = is_tuple ? PyTuple_GetItem(carried, i) : carried;
        if (!PyUnicode_CheckExact(item) && !PyLong_CheckExact(item) && !is_compared_by_identity(item))
            return NULL; /* bools are equal to other numbers */
    }
    PyObject *key = PyTuple_Pack(3, kind, carried, Py_None);
    PyObject *token = key == NULL ? NULL : PyDict_GetItemWithError(self->nodes, key);
    Py_XINCREF(token);
    Py_XDECREF(key);
    return token;
}

/* Looks at a container of JAX's registry of pytrees, or at what is none, by its address. */
static int
look_at_node(FastPath *self, Call *call, PyObject *x, int depth)
{
    PyObject *node = PyObject_CallFunctionObjArgs(self->flatten, x, NULL), *parts = NULL;
    if (node == NULL) {
        is_left_to_python();
        return -1;
    }
    int found = -1;
    if (node == Py_None)
        found = describe_object(call, IDENTITY, x) < 0 ? -1 : 1;
    else if (PyTuple_Check(node) && PyTuple_Size(node) == 2)
        parts = PySequence_Tuple(PyTuple_GetItem(node, 0));
    if (found == -1 && parts == NULL)
        is_left_to_python();
    PyObject *token = parts == NULL ? NULL
        : find_node(self, (PyObject *)Py_TYPE(x), PyTuple_GetItem(node, 1));
    if (token != NULL) {
        Py_ssize_t length = PyTuple_Size(parts);
        found = describe(call, NODE, (uintptr_t)length) < 0 || describe_token(call, token) < 0 ? -1 : 1;
        found = found == 1 ? look_at_items(self, call, parts, length, depth) : -1;
    }
    Py_XDECREF(token);
    Py_XDECREF(parts);
    Py_DECREF(node);
    return found;
}

/* Looks at a container that was described before, if it holds the same; 0 if it was not. */
static int
look_at_watched(FastPath *self, Call *call, PyObject *x)
{
    PyObject *id = PyLong_FromVoidPtr(x);
    PyObject *watched = id == NULL ? NULL : PyDict_GetItemWithError(self->watched, id);
    Py_XINCREF(watched);
    Py_XDECREF(id);
    if (watched == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int found = -1;
    if (PyTuple_Check(watched) && PyTuple_Size(watched) == 3 &&
        hold_the_same(PyTuple_GetItem(watched, 2)))
        found = describe_token(call, PyTuple_GetItem(watched, 1)) < 0 ? -1 : 1;
    Py_DECREF(watched);
    return found;
}

/* Looks at containers and at what is no operand. */
static int
look_at_parts(FastPath *self, Call *call, PyObject *x, int depth)
{
    if (PyUnicode_CheckExact(x))
        return describe_string(call, STRING, x) < 0 ? -1 : 1;
    if (depth > MAX_DEPTH)
        return -1;
    int found = PyDict_Size(self->watched) > 0 ? look_at_watched(self, call, x) : 0;
    if (found != 0)
        return found;
    int is_tuple = PyTuple_CheckExact(x);
    if (is_tuple || PyList_CheckExact(x)) {
        Py_ssize_t length = is_tuple ? PyTuple_Size(x) : PyList_Size(x);
        if (describe(call, is_tuple ? TUPLE : LIST, (uintptr_t)length) < 0)
            return -1;
        return look_at_items(self, call, x, length, depth);
    }
    if (PyDict_CheckExact(x))
        found = look_at_dict(self, call, x, depth);
    return found == 0 ? look_at_node(self, call, x, depth) : found;
}

/* Looks at an argument or a part of one. */
static int
look_at(FastPath *self, Call *call, PyObject *x, int depth)
{
    int found = look_at_single(self, call, x);
    found = found == 0 ? look_at_parts(self, call, x, depth) : found;
    return found == 1 ? 1 : -1;
}

/* Looks at the value of a keyword argument: a string or number, which is static; an operand that is
 * known as a whole, or a list or dict, which is none if it is static. Python has to say what others
 * are. */
static int
look_at_option(FastPath *self, Call *call, PyObject *x)
{
    PyObject *kind = (PyObject *)Py_TYPE(x);
    if (PyUnicode_CheckExact(x))
        return describe_string(call, STRING, x) < 0 ? -1 : 1;
    if (PyBool_Check(x))
        return describe(call, BOOL, x == Py_True) < 0 ? -1 : 1;
    if (PyLong_CheckExact(x)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(x, &overflow);
        return overflow || describe(call, INT, (uintptr_t)value) < 0 ? -1 : 1;
    }
    if (PyFloat_CheckExact(x)) {
        double value = PyFloat_AsDouble(x);
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        return describe(call, FLOAT, (uintptr_t)bits) < 0 ? -1 : 1;
    }
    if (PyList_CheckExact(x) || PyDict_CheckExact(x) || kind == self->ndarray)
        return look_at(self, call, x, 0);
    int found = kind == self->result ? 0 : look_at_known(self, call, x);
    found = found == 0 ? look_at_symbol(self, call, x) : found;
    return found == 1 ? 1 : -1;
}

/* Looks at keyword arguments, in the order of their names. */
static int
look_at_options(FastPath *self, Call *call, PyObject *names, PyObject *const *values)
{
    Py_ssize_t order[MAX_DEPTH], count = PyTuple_Size(names);
    if (count > MAX_DEPTH)
        return -1;
    for (Py_ssize_t k = 0; k < count; k++) {
        Py_ssize_t i = k;
        PyObject *name = PyTuple_GetItem(names, k);
        for (; i > 0 && PyUnicode_Compare(PyTuple_GetItem(names, order[i - 1]), name) > 0; i--)
            order[i] = order[i - 1];
        order[i] = k;
    }
    int found = 1;
    for (Py_ssize_t k = 0; found == 1 && k < count; k++) {
        found = describe_string(call, KEYWORD, PyTuple_GetItem(names, order[k])) < 0 ? -1 : 1;
        found = found == 1 ? look_at_option(self, call, values[order[k]]) : found;
    }
    return found;
}

/* Looks at the function of a cell, which is known by a token as long as it holds the same things;
 * *held, a new reference, has references to operands among these. */
static int
look_at_cell(FastPath *self, Call *call, PyObject *cell, PyObject **held)
{
    PyObject *known = Py_XNewRef(PyDict_GetItemWithError(self->cells, cell));
    if (known == NULL && !PyErr_Occurred()) { /* for the first time in this recording */
        known = PyObject_CallMethodObjArgs(self->recorder, name_described_cell, cell, NULL);
        if (known == NULL && PyErr_ExceptionMatches(PyExc_Exception))
            PyErr_Clear(); /* Python says once more why it is not described */
    }
    if (known == NULL || !PyTuple_Check(known) || PyTuple_Size(known) != 3) {
        Py_XDECREF(known);
        return -1;
    }
    PyObject *token = PyTuple_GetItem(known, 1);
    int found = hold_the_same(PyTuple_GetItem(known, 0)) ? 1 : -1;
    if (found == 1)
        found = push_taken(&call->held, Py_NewRef(token)) < 0 ||
                push_word(&call->words, (uintptr_t)token) < 0 ? -1 : 1;
    *held = Py_NewRef(PyTuple_GetItem(known, 2));
    Py_DECREF(known);
    return found;
}

/* Whether results are a tuple of arrays: 1 or 0, -1 with an error. */
static int
is_flat_tuple(PyObject *tree)
{
    PyObject *data = PyObject_CallMethod(tree, "node_data", NULL);
    int is_flat = data == NULL ? -1 : PyTuple_Check(data) && PyTuple_Size(data) > 0 &&
                                          PyTuple_GetItem(data, 0) == (PyObject *)&PyTuple_Type;
    PyObject *children = is_flat == 1 ? PyObject_CallMethod(tree, "children", NULL) : NULL;
    if (is_flat == 1)
        is_flat = children == NULL ? -1 : PyList_Check(children);
    for (Py_ssize_t i = 0; is_flat == 1 && i < PyList_Size(children); i++) {
        PyObject *own = PyObject_CallMethod(PyList_GetItem(children, i), "node_data", NULL);
        is_flat = own == NULL ? -1 : own == Py_None; /* a leaf */
        Py_XDECREF(own);
    }
    Py_XDECREF(children);
    Py_XDECREF(data);
    return is_flat;
}

/* The way of a call that leads to a call spec, in terms of C; NULL with an error. */
static Way *
make_way(const Call *call, PyObject *call_spec)
{
    Way *way = new_way(&call->words);
    if (way == NULL)
        return NULL;
    PyObject *tree = PyObject_GetAttr(call_spec, name_tree);
    PyObject *id = PyObject_GetAttr(call_spec, name_node_type);
    way->id = id == NULL ? -1 : PyLong_AsLongLong(id);
    Py_XDECREF(id);
    way->held = PyTuple_New(call->held.count);
    way->call_spec = Py_NewRef(call_spec);
    way->kinds = PyObject_GetAttr(call_spec, name_results);
    way->unit = PyObject_GetAttr(call_spec, name_unit);
    way->made_values = PyObject_GetAttr(call_spec, name_made_values);
    way->num_results = way->kinds == NULL ? -1 : PyTuple_Size(way->kinds);
    if (tree == NULL || way->held == NULL || way->id < 0 || way->unit == NULL ||
        way->made_values == NULL || way->num_results < 0) {
        Py_XDECREF(tree);
        free_way(way);
        return NULL;
    }
    way->is_single = tree == Py_None;
    way->is_flat = way->is_single ? 0 : is_flat_tuple(tree);
    Py_DECREF(tree);
    if (way->is_flat < 0) {
        free_way(way);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < call->held.count; i++)
        PyTuple_SetItem(way->held, i, Py_NewRef((PyObject *)call->held.words[i]));
    return way;
}

/* How a call like this was recorded before; NULL without an error: it is left to Python. */
static Way *
find(FastPath *self, Call *call, PyObject *cell, PyObject *const *args, Py_ssize_t length,
     PyObject *names)
{
    PyObject *held = NULL;
    int found = look_at_cell(self, call, cell, &held);
    for (Py_ssize_t i = 0; found == 1 && i < length; i++)
        found = look_at(self, call, args[i], 0);
    for (Py_ssize_t i = 0; found == 1 && i < PyTuple_Size(held); i++)
        found = push_references(call, PyTuple_GetItem(held, i), 1) < 0 ? -1 : 1;
    Py_XDECREF(held);
    if (found == 1 && names != NULL)
        found = look_at_options(self, call, names, args + length);
    Way *way = found == 1 ? find_way(&self->ways, &call->words) : NULL;
    if (found != 1 || way != NULL)
        return way;
    PyObject *key = key_of(self, &call->words);
    PyObject *call_spec = key == NULL ? NULL : PyDict_GetItemWithError(self->calls, key);
    Py_XINCREF(call_spec);
    Py_XDECREF(key);
    if (call_spec != NULL)
        way = make_way(call, call_spec);
    if (way != NULL && add_way(&self->ways, way) < 0) {
        free_way(way);
        way = NULL;
    }
    Py_XDECREF(call_spec);
    return way == NULL ? NULL : find_way(&self->ways, &call->words);
}

/* A symbol for result number `number`.
 *
 * The collector of garbage does not follow symbols that are made here, which saves a fifth of
 * recording: a function that calls itself is a circle, so its symbols wait for the collector. They
 * refer to numbers and to the recorder, which lets go of all of its symbols when it is done; so no
 * circle goes through one. */
static PyObject *
make_result(FastPath *self, PyObject *number, PyObject *kind)
{
    PyObject *x = number == NULL ? NULL : PyType_GenericAlloc((PyTypeObject *)self->result, 0);
    if (x == NULL)
        return NULL;
    PyObject_GC_UnTrack(x);
    *slot(x, self->trace_at) = Py_NewRef(self->recorder);
    *slot(x, self->index_at) = Py_NewRef(number);
    *slot(x, self->type_at) = Py_NewRef(kind);
    return x;
}

/* Gives results of an instance before the numbers from `first` on; a reference, or NULL without an
 * error if there are none to be used again. */
static PyObject *
take_spare(FastPath *self, Way *way, int64_t first)
{
    if (way->num_spare == 0)
        return NULL;
    PyObject *results = way->spare[--way->num_spare];
    for (Py_ssize_t i = 0; i < way->num_results; i++) {
        PyObject *number = PyLong_FromLongLong(first + i);
        if (number == NULL) {
            Py_DECREF(results);
            return NULL;
        }
        PyObject **at = slot(PyTuple_GetItem(results, i), self->index_at), *before = *at;
        *at = number;
        Py_DECREF(before);
    }
    return results;
}

/* Whether nobody but its tuple has a result, or has noted anything in it. */
static int
is_spare(FastPath *self, PyObject *x)
{
    if (Py_REFCNT(x) != 1 || (PyObject *)Py_TYPE(x) != self->result || *slot(x, self->weak_at))
        return 0;
    for (Py_ssize_t at = sizeof(PyObject); at < self->result_size; at += sizeof(PyObject *))
        if (at != self->trace_at && at != self->index_at && at != self->type_at && *slot(x, at))
            return 0;
    return *slot(x, self->trace_at) == self->recorder;
}

/* Keeps results of the instance at hand that nobody has but `kept`, for the next instance, which
 * then makes no tuple and no symbols for them. */
static void
keep_spare(FastPath *self)
{
    for (size_t i = 0; i < self->num_made; i++) {
        PyObject *results = self->made[i].results;
        int spare = Py_REFCNT(results) == 1;
        for (Py_ssize_t k = 0; spare && k < self->made[i].way->num_results; k++)
            spare = is_spare(self, PyTuple_GetItem(results, k));
        if (spare)
            add_spare(self->made[i].way, results);
    }
    self->num_made = 0;
}

/* Notes results that were made, if there is memory. */
static void
note_made(FastPath *self, PyObject *results, Way *way)
{
    if (self->num_made == self->room_made) {
        size_t room = self->room_made ? 2 * self->room_made : 64;
        Made *more = realloc(self->made, room * sizeof(Made));
        if (more == NULL)
            return;
        self->made = more;
        self->room_made = room;
    }
    self->made[self->num_made++] = (Made){results, way};
}

/* A tuple of results from number `first` on, known as a whole by the token of the way. */
static PyObject *
make_tuple(FastPath *self, Way *way, int64_t first, PyObject *kinds, PyObject *unit)
{
    Py_ssize_t length = PyTuple_Size(kinds);
    PyObject *results = take_spare(self, way, first);
    int is_new = results == NULL && !PyErr_Occurred();
    if (is_new)
        results = PyTuple_New(length);
    PyObject *first_number = results == NULL ? NULL : is_new ? PyLong_FromLongLong(first)
        : Py_NewRef(*slot(PyTuple_GetItem(results, 0), self->index_at));
    for (Py_ssize_t i = 0; is_new && results != NULL && i < length; i++) {
        PyObject *number = i > 0 ? PyLong_FromLongLong(first + i) : Py_XNewRef(first_number);
        PyObject *x = make_result(self, number, PyTuple_GetItem(kinds, i));
        Py_XDECREF(number);
        if (x == NULL)
            Py_CLEAR(results);
        else
            PyTuple_SetItem(results, i, x);
    }
    if (results != NULL && first_number != NULL &&
        (PyList_Append(self->kept, results) < 0 ||
         add_known_object(&self->objects, results, unit, first_number, way->num_results, 0) < 0))
        Py_CLEAR(results);
    if (first_number == NULL)
        Py_CLEAR(results);
    else if (results != NULL)
        note_made(self, results, way);
    Py_XDECREF(first_number);
    return results;
}

/* Results from number `first` on, in the structure of a call; the twin of `Recorder.results`. */
static PyObject *
make_tree(FastPath *self, int64_t first, PyObject *kinds, PyObject *call_spec)
{
    Py_ssize_t length = PyTuple_Size(kinds);
    PyObject *values = PyList_New(length), *results = NULL;
    PyObject *tree = PyObject_GetAttr(call_spec, name_tree);
    for (Py_ssize_t i = 0; values != NULL && i < length; i++) {
        PyObject *number = PyLong_FromLongLong(first + i);
        PyObject *x = make_result(self, number, PyTuple_GetItem(kinds, i));
        Py_XDECREF(number);
        if (x == NULL)
            Py_CLEAR(values);
        else
            PyList_SetItem(values, i, x);
    }
    if (values != NULL && tree != NULL)
        results = PyObject_CallMethodObjArgs(tree, name_unflatten, values, NULL);
    Py_XDECREF(values);
    Py_XDECREF(tree);
    return results;
}

/* Writes the node of a call, whose results begin with number `*first`, and those of the shared
 * values that are operands of it. */
static int
write_node(FastPath *self, const Way *way, const Words *reads, int64_t *first)
{
    Ints *references = (Ints *)self->references, *counter = (Ints *)self->counter;
    Ints *call_specs = (Ints *)self->call_specs;
    Py_ssize_t num_reads = references->count, num_nodes = call_specs->count;
    Py_ssize_t num_made = PyTuple_Size(way->made_values) / 2, made = 0, read = 0;
    int failed = counter->count != 1;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "expected the number of results");
    for (Py_ssize_t i = 0; !failed && i < reads->count + num_made; i++)
        if (made < num_made &&
            PyLong_AsSsize_t(PyTuple_GetItem(way->made_values, 2 * made)) == i) {
            PyObject *id = PyTuple_GetItem(way->made_values, 2 * made + 1);
            failed = append_int(call_specs, PyLong_AsLongLong(id)) < 0 ||
                     append_int(references, counter->items[0] + made++) < 0;
        } else
            failed = append_int(references, (int64_t)(intptr_t)reads->words[read++]) < 0;
    failed = failed || append_int(call_specs, way->id) < 0;
    if (failed) {
        references->count = num_reads;
        call_specs->count = num_nodes;
        return -1;
    }
    *first = counter->items[0] + num_made;
    counter->items[0] = *first + way->num_results;
    return 0;
}

/* Records a call as it was recorded before, and returns its results. */
static PyObject *
record(FastPath *self, Way *way, const Words *reads)
{
    int64_t first;
    if (write_node(self, way, reads, &first) < 0)
        return NULL;
    PyObject *kinds = Py_NewRef(way->kinds), *unit = Py_NewRef(way->unit), *results;
    PyObject *call_spec = Py_NewRef(way->call_spec);
    if (way->is_flat)
        results = make_tuple(self, way, first, kinds, unit);
    else if (way->is_single) {
        PyObject *number = PyLong_FromLongLong(first);
        results = make_result(self, number, PyTuple_GetItem(kinds, 0));
        Py_XDECREF(number);
    } else {
        results = make_tree(self, first, kinds, call_spec);
        PyObject *number = results == NULL || unit == Py_None ? NULL : PyLong_FromLongLong(first);
        if (results != NULL && unit != Py_None &&
            (number == NULL || PyList_Append(self->kept, results) < 0 ||
             add_known_object(&self->objects, results, unit, number, way->num_results, 0) < 0))
            Py_CLEAR(results);
        Py_XDECREF(number);
    }
    Py_DECREF(kinds);
    Py_DECREF(unit);
    Py_DECREF(call_spec);
    return results;
}

/* Tells Python about the results that it does not know yet. */
static int
publish(FastPath *self)
{
    while (self->objects.num_published < self->objects.count) {
        Known item = self->objects.items[self->objects.num_published++];
        if (item.is_published)
            continue;
        PyObject *id = PyLong_FromVoidPtr(item.x);
        PyObject *reference = PyTuple_Pack(2, item.token, item.index);
        int failed = id == NULL || reference == NULL ||
                     PyDict_SetItem(self->known, id, reference) < 0;
        Py_XDECREF(id);
        Py_XDECREF(reference);
        if (failed)
            return -1;
    }
    return 0;
}

/* Records a call and returns its results; NULL without an error if it is left to Python. */
static PyObject *
record_known(FastPath *self, PyObject *cell, PyObject *const *args, Py_ssize_t count,
             PyObject *names)
{
    Call call;
    init_words(&call.words);
    init_words(&call.held);
    init_words(&call.reads);
    Way *way = find(self, &call, cell, args, count, names);
    PyObject *results = way == NULL ? NULL : record(self, way, &call.reads);
    free_words(&call.words);
    free_words(&call.reads);
    release(&call.held);
    if (way == NULL && !PyErr_Occurred())
        publish(self);
    return results;
}

/* call_cell(cell, args, options): records a call and returns its results. */
static PyObject *
call_cell(PyObject *object, PyObject *const *argv, Py_ssize_t argc)
{
    FastPath *self = (FastPath *)object;
    if (argc != 3 || (PyObject *)Py_TYPE(argv[0]) != self->cell || !PyTuple_Check(argv[1]) ||
        !PyDict_Check(argv[2])) {
        PyErr_SetString(PyExc_TypeError, "expected a cell, a tuple and a dict");
        return NULL;
    }
    PyObject *args[FEW_ARGUMENTS], *results = NULL;
    Py_ssize_t count = PyTuple_Size(argv[1]);
    if (count <= FEW_ARGUMENTS && PyDict_Size(argv[2]) == 0) {
        for (Py_ssize_t i = 0; i < count; i++)
            args[i] = PyTuple_GetItem(argv[1], i);
        results = record_known(self, argv[0], args, count, NULL);
    } else
        publish(self);
    if (results != NULL || PyErr_Occurred())
        return results;
    return PyObject_CallFunctionObjArgs(self->python, argv[0], argv[1], argv[2], NULL);
}

int
is_fast_path(PyObject *x)
{
    return PyCFunction_CheckExact(x) &&
           PyCFunction_GetFunction(x) == (PyCFunction)(void (*)(void))call_cell;
}

PyObject *
record_call(PyObject *object, PyObject *cell, PyObject *const *args, Py_ssize_t count,
            PyObject *names)
{
    FastPath *self = (FastPath *)object;
    PyObject *results = record_known(self, cell, args, count, names);
    if (results != NULL || PyErr_Occurred())
        return results;
    return call_recorder(self->python, cell, args, count, names);
}

/* forget_objects(): forgets what is known by its address, before the objects are let go. */
static PyObject *
forget_objects(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    FastPath *self = (FastPath *)object;
    clear_known_objects(&self->objects);
    self->num_made = 0;
    free_all_spare(&self->ways);
    return Py_NewRef(Py_None);
}

/* next_instance(): does the same where another instance follows. */
static PyObject *
next_instance(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    FastPath *self = (FastPath *)object;
    clear_known_objects(&self->objects);
    keep_spare(self);
    return Py_NewRef(Py_None);
}

#define EACH(visit)                                                                               \
    visit(recorder) visit(result) visit(shared) visit(cell) visit(known) visit(computed)          \
    visit(kept) visit(numbers) visit(arrays) visit(nodes) visit(units) visit(ndarray) visit(same) \
    visit(watched) visit(calls) visit(cells) visit(call_specs) visit(references)                  \
    visit(input_group) visit(counter) visit(input_value) visit(flatten) visit(python)             \
    visit(of_ints)

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    FastPath *self = (FastPath *)object;
    Py_VISIT(Py_TYPE(object));
#define VISIT(member) Py_VISIT(self->member);
    EACH(VISIT)
    for (size_t i = 0; i < self->ways.room; i++)
        if (self->ways.slots[i] != NULL) {
            Py_VISIT(self->ways.slots[i]->held);
            Py_VISIT(self->ways.slots[i]->call_spec);
            Py_VISIT(self->ways.slots[i]->kinds);
        }
    return 0;
}

static int
clear(PyObject *object)
{
    FastPath *self = (FastPath *)object;
    free_known_objects(&self->objects);
    free(self->made);
    self->made = NULL;
    self->num_made = self->room_made = 0;
    clear_ways(&self->ways);
#define CLEAR(member) Py_CLEAR(self->member);
    EACH(CLEAR)
    return 0;
}

static void
dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* A number that a class has; 0 with an error. */
static Py_ssize_t
number_of(PyObject *class, const char *name)
{
    PyObject *x = PyObject_GetAttrString(class, name);
    Py_ssize_t number = x == NULL ? 0 : PyLong_AsSsize_t(x);
    Py_XDECREF(x);
    if (number == 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "expected `%s` of %R not to be 0", name, class);
    return PyErr_Occurred() ? 0 : number;
}

/* fast_path(recorder, (class of results, of shared values, of cells, ...), known, ..., python): the methods
 * `call_cell`, `forget_objects` and `next_instance` of a `FastPath`. */
PyObject *
make_fast_path(PyObject *module, PyObject *args)
{
    (void)module;
    FastPath *self = (FastPath *)PyType_GenericAlloc(fast_path_type, 0);
    if (self == NULL)
        return NULL;
    PyObject *object = (PyObject *)self, *methods = NULL;
    if (!PyArg_ParseTuple(
            args, "O(O!O!O!OO)O!O!O!(O!O!O!)O!O!(O!O!)(O!O!O!O!)O!OO", &self->recorder, &PyType_Type,
            &self->result, &PyType_Type, &self->shared, &PyType_Type, &self->cell, &self->ndarray,
            &self->same,
            &PyDict_Type, &self->known, &PyDict_Type, &self->computed,
            &PyList_Type, &self->kept, &PyDict_Type, &self->numbers, &PyDict_Type, &self->arrays,
            &PyDict_Type, &self->nodes, &PyList_Type, &self->units,
            &PyDict_Type, &self->watched, &PyDict_Type, &self->calls,
            &PyDict_Type, &self->cells,
            ints_type, &self->call_specs, ints_type, &self->references, ints_type,
            &self->input_group, ints_type, &self->counter, &PyList_Type, &self->input_value,
            &self->flatten, &self->python)) {
#define FORGET(member) self->member = NULL; /* borrowed so far */
        EACH(FORGET)
        Py_DECREF(object);
        return NULL;
    }
#define HOLD(member) Py_XINCREF(self->member);
    EACH(HOLD)
    if ((self->trace_at = find_slot(self->result, "_trace")) >= 0 &&
        (self->index_at = find_slot(self->result, "index")) >= 0 &&
        (self->type_at = find_slot(self->result, "type")) >= 0 &&
        (self->result_size = number_of(self->result, "__basicsize__")) > 0 &&
        (self->weak_at = number_of(self->result, "__weakrefoffset__")) != 0 &&
        note_recorder(self->recorder) == 0) {
        PyObject *call = PyObject_GetAttrString(object, "call_cell");
        PyObject *forget = PyObject_GetAttrString(object, "forget_objects");
        PyObject *next = PyObject_GetAttrString(object, "next_instance");
        if (call != NULL && forget != NULL && next != NULL)
            methods = PyTuple_Pack(3, call, forget, next);
        Py_XDECREF(call);
        Py_XDECREF(forget);
        Py_XDECREF(next);
    }
    Py_DECREF(object);
    return methods;
}

static PyMethodDef methods[] = {
    {"call_cell", (PyCFunction)(void (*)(void))call_cell, METH_FASTCALL, NULL},
    {"forget_objects", forget_objects, METH_NOARGS, NULL},
    {"next_instance", next_instance, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_traverse, traverse}, {Py_tp_clear, clear}, {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},   {0, NULL},
};

static PyType_Spec spec = {
    "jedbatch._support.native_core.FastPath", sizeof(FastPath), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots,
};

int
init_fast_path(PyObject *module)
{
    (void)module;
    fast_path_type = (PyTypeObject *)PyType_FromSpec(&spec);
    name_results = PyUnicode_InternFromString("results");
    name_node_type = PyUnicode_InternFromString("node_type");
    name_tree = PyUnicode_InternFromString("tree");
    name_unit = PyUnicode_InternFromString("unit");
    name_made_values = PyUnicode_InternFromString("made_values");
    name_described_cell = PyUnicode_InternFromString("described_cell");
    name_shape = PyUnicode_InternFromString("shape");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_copy = PyUnicode_InternFromString("copy");
    name_symbol = PyUnicode_InternFromString("symbol");
    name_unflatten = PyUnicode_InternFromString("unflatten");
    return fast_path_type == NULL || PyErr_Occurred() ? -1 : 0;
}
