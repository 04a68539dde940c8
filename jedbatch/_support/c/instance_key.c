/* Keys of instances: the twins of `tree_keys` and of `written_key` in `_record/instances/key.py`.
 *
 * No Python code runs while a plain tree is looked at and nothing is let go, so its parts stay.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef struct {
    PyObject **items; /* a hash table of containers that were met */
    size_t count, room;
} Objects;

static int
is_container(PyObject *x)
{
    return PyTuple_CheckExact(x) || PyList_CheckExact(x) || PyDict_CheckExact(x);
}

static size_t
place(const Objects *met, PyObject *x)
{
    size_t at = ((uintptr_t)x >> 4) * 0x9E3779B97F4A7C15u >> 16;
    for (at &= met->room - 1; met->items[at] != NULL && met->items[at] != x;)
        at = (at + 1) & (met->room - 1);
    return at;
}

static void
forget(Objects *met)
{
    if (met->count > 0)
        memset(met->items, 0, met->room * sizeof(PyObject *));
    met->count = 0;
}

/* Adds a container to those that were met: 1 if it is new, 0 if not, -1 without memory. */
static int
meet(Objects *met, PyObject *x)
{
    if (2 * met->count >= met->room) {
        Objects larger = {NULL, met->count, met->room ? 2 * met->room : 256};
        larger.items = calloc(larger.room, sizeof(PyObject *));
        if (larger.items == NULL)
            return -1;
        for (size_t i = 0; i < met->room; i++)
            if (met->items[i] != NULL)
                larger.items[place(&larger, met->items[i])] = met->items[i];
        free(met->items);
        *met = larger;
    }
    size_t at = place(met, x);
    if (met->items[at] == x)
        return 0;
    met->items[at] = x;
    met->count++;
    return 1;
}

typedef struct {
    char *data;
    size_t count, room;
} Text;

enum { IS_OTHER = 0, IS_WRITTEN = 1, IS_LEFT = 2, MAX_DEPTH = 256 };

/* Returns where to write so many bytes more; NULL without memory. */
static char *
more(Text *text, size_t size)
{
    if (text->room - text->count < size) {
        size_t room = 2 * text->room + size + 1024;
        char *data = realloc(text->data, room);
        if (data == NULL)
            return NULL;
        text->data = data;
        text->room = room;
    }
    char *at = text->data + text->count;
    text->count += size;
    return at;
}

/* Writes the code of a type and so many bytes of a number, the lowest first. */
static int
write_number(Text *text, char code, uint64_t number, int size)
{
    char *at = more(text, 1 + (size_t)size);
    if (at == NULL)
        return -1;
    *at++ = code;
    for (int i = 0; i < size; i++)
        *at++ = (char)(number >> 8 * i);
    return IS_WRITTEN;
}

static int
write_string(Text *text, PyObject *x)
{
    Py_ssize_t length;
    const char *data = PyUnicode_AsUTF8AndSize(x, &length);
    if (data == NULL || length > INT32_MAX) { /* half of a pair of code units */
        PyErr_Clear();
        return IS_OTHER;
    }
    int written = write_number(text, 'u', (uint64_t)length, 4);
    char *at = written == IS_WRITTEN ? more(text, (size_t)length) : NULL;
    if (at == NULL)
        return -1;
    memcpy(at, data, (size_t)length);
    return IS_WRITTEN;
}

/* The arrays that trees may hold. */
typedef struct {
    PyObject *type, *dtypes; /* of arrays; their dtypes with a number for each */
    PyObject *dtype, *shape; /* names of attributes */
    PyObject *found;         /* list of the arrays of a tree */
} Arrays;

/* Writes the dtype and the shape of an array; as `write_tree`, and -1 with an error, too. */
static int
write_array(Text *text, Objects *met, const Arrays *arrays, PyObject *x)
{
    int written = Py_REFCNT(x) == 1 ? IS_WRITTEN : meet(met, x);
    if (written != IS_WRITTEN)
        return written;
    PyObject *dtype = PyObject_GetAttr(x, arrays->dtype);
    PyObject *number = dtype == NULL ? NULL : PyDict_GetItemWithError(arrays->dtypes, dtype);
    Py_XDECREF(dtype);
    if (number == NULL)
        return PyErr_Occurred() ? -1 : IS_OTHER;
    written = write_number(text, 'A', (uint64_t)PyLong_AsLong(number), 4);
    PyObject *shape = PyObject_GetAttr(x, arrays->shape);
    if (shape == NULL)
        return -1;
    Py_ssize_t length = PyTuple_Size(shape);
    if (written == IS_WRITTEN)
        written = write_number(text, '(', (uint64_t)length, 4);
    for (Py_ssize_t i = 0; written == IS_WRITTEN && i < length; i++)
        written = write_number(text, 'g', (uint64_t)PyLong_AsLongLong(PyTuple_GetItem(shape, i)), 8);
    Py_DECREF(shape);
    return written == IS_WRITTEN && PyList_Append(arrays->found, x) < 0 ? -1 : written;
}

static int write_tree(Text *text, Objects *met, const Arrays *arrays, PyObject *x, int depth,
                      int *is_constant);

/* Writes the keys and values of a dict; as `write_tree`. */
static int
write_items(Text *text, Objects *met, const Arrays *arrays, PyObject *x, int depth,
            int *is_constant)
{
    int written = write_number(text, '{', 0, 0);
    PyObject *key, *value;
    for (Py_ssize_t at = 0; written == IS_WRITTEN && PyDict_Next(x, &at, &key, &value);) {
        written = is_container(key) ? IS_OTHER
                                    : write_tree(text, met, NULL, key, depth, is_constant);
        if (written == IS_WRITTEN)
            written = write_tree(text, met, arrays, value, depth, is_constant);
    }
    return written == IS_WRITTEN ? write_number(text, '0', 0, 0) : written;
}

/* Writes a tree as `marshal.dumps(x, 2)` does, on the way through it: `IS_WRITTEN`, `IS_OTHER` if it
 * is left to Python, -1 without memory. There may be arrays in it, unless `arrays` is NULL. */
static int
write_tree(Text *text, Objects *met, const Arrays *arrays, PyObject *x, int depth,
           int *is_constant)
{
    if (PyLong_CheckExact(x)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(x, &overflow);
        if (overflow || number < INT32_MIN || number > INT32_MAX)
            return IS_OTHER;
        return write_number(text, 'i', (uint64_t)number, 4);
    }
    if (PyFloat_CheckExact(x)) {
        double number = PyFloat_AsDouble(x);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return write_number(text, 'g', bits, 8);
    }
    if (x == Py_None)
        return write_number(text, 'N', 0, 0);
    if (PyBool_Check(x))
        return write_number(text, x == Py_True ? 'T' : 'F', 0, 0);
    if (PyUnicode_CheckExact(x))
        return write_string(text, x);
    if (arrays != NULL && (PyObject *)Py_TYPE(x) == arrays->type)
        return write_array(text, met, arrays, x);
    int is_tuple = PyTuple_CheckExact(x);
    if (!is_container(x) || depth == MAX_DEPTH)
        return IS_OTHER;
    int found = Py_REFCNT(x) == 1 ? IS_WRITTEN : meet(met, x);
    *is_constant &= is_tuple;
    if (found != IS_WRITTEN)
        return found;
    if (PyDict_CheckExact(x))
        return write_items(text, met, arrays, x, depth + 1, is_constant);
    Py_ssize_t length = is_tuple ? PyTuple_Size(x) : PyList_Size(x);
    found = length > INT32_MAX ? IS_OTHER
                               : write_number(text, is_tuple ? '(' : '[', (uint64_t)length, 4);
    for (Py_ssize_t i = 0; found == IS_WRITTEN && i < length; i++) {
        PyObject *part = is_tuple ? PyTuple_GetItem(x, i) : PyList_GetItem(x, i);
        found = write_tree(text, met, arrays, part, depth + 1, is_constant);
    }
    return found;
}

/* tree_keys(instances, numpy.ndarray, dtypes, all): (keys of plain trees that may hold arrays of
 * these dtypes, None of others; whether the trees cannot change; lists of the arrays in them); None
 * if `all` have to be such trees and one is not. */
PyObject *
tree_keys(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *instances, *found = NULL;
    Arrays arrays = {0};
    int all, left_out = 0;
    if (!PyArg_ParseTuple(args, "O!OO!p", &PyList_Type, &instances, &arrays.type, &PyDict_Type,
                          &arrays.dtypes, &all))
        return NULL;
    Objects met = {NULL, 0, 0};
    Text text = {NULL, 0, 0};
    PyObject *keys = PyList_New(0), *constant = PyList_New(0), *held = PyList_New(0);
    arrays.dtype = PyUnicode_InternFromString("dtype");
    arrays.shape = PyUnicode_InternFromString("shape");
    int failed = keys == NULL || constant == NULL || held == NULL || PyErr_Occurred();
    for (Py_ssize_t i = 0; !failed && !left_out && i < PyList_Size(instances); i++) {
        PyObject *instance = Py_NewRef(PyList_GetItem(instances, i)), *key = NULL;
        int is_constant = 1, written = -1;
        text.count = 0;
        forget(&met);
        arrays.found = PyList_New(0);
        if (arrays.found != NULL)
            written = write_tree(&text, &met, &arrays, instance, 0, &is_constant);
        if (written == IS_WRITTEN)
            key = PyBytes_FromStringAndSize(text.data, (Py_ssize_t)text.count);
        else if (written == IS_OTHER)
            key = Py_NewRef(Py_None);
        left_out = all && key == Py_None;
        is_constant &= written == IS_WRITTEN;
        failed = key == NULL || PyList_Append(keys, key) < 0 ||
                 PyList_Append(constant, is_constant ? Py_True : Py_False) < 0 ||
                 PyList_Append(held, arrays.found) < 0;
        Py_XDECREF(key);
        Py_XDECREF(arrays.found);
        Py_DECREF(instance);
    }
    free(met.items);
    free(text.data);
    if (!failed)
        found = left_out ? Py_NewRef(Py_None) : PyTuple_Pack(3, keys, constant, held);
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    Py_XDECREF(keys);
    Py_XDECREF(constant);
    Py_XDECREF(held);
    Py_XDECREF(arrays.dtype);
    Py_XDECREF(arrays.shape);
    return found;
}

/* The tokens of an instance, as `instance_key` writes them.
 *
 * Parts that are not looked into yet are held. Objects of a class are described by what `ways` has
 * for it: (how, its token, the names of its attributes). */
enum { SCALAR = 0, NAMED = 1, FIELDS = 2, ATTRIBUTES = 3, LEAF = 4 }; /* as in Python */

typedef struct {
    PyObject *ways, *ndarray, *dtypes, *typed, *array;      /* given */
    PyObject *tokens, *arrays;                              /* lists, written */
    PyObject *dtype_name, *shape_name, *bytes_name;         /* of attributes and methods */
    PyObject **stack;
    Py_ssize_t count, room, outside; /* what there was below an object that is no container, or -1 */
    Objects met;
} Tokens;

/* Adds a token and lets go of it; NULL is an error. */
static int
add_token(Tokens *self, PyObject *token)
{
    int failed = token == NULL || PyList_Append(self->tokens, token) < 0;
    Py_XDECREF(token);
    return failed ? -1 : IS_WRITTEN;
}

static int
push_part(Tokens *self, PyObject *x)
{
    if (self->count == self->room) {
        Py_ssize_t room = self->room ? 2 * self->room : 256;
        PyObject **stack = realloc(self->stack, (size_t)room * sizeof(PyObject *));
        if (stack == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->stack = stack;
        self->room = room;
    }
    self->stack[self->count++] = Py_NewRef(x);
    return IS_WRITTEN;
}

/* Turns the parts around that were added since there were `first`: the first is looked at next. */
static void
turn_parts(Tokens *self, Py_ssize_t first)
{
    for (Py_ssize_t i = first, j = self->count - 1; i < j; i++, j--) {
        PyObject *x = self->stack[i];
        self->stack[i] = self->stack[j];
        self->stack[j] = x;
    }
}

/* Whether something is met for the first time: `IS_WRITTEN`, or `IS_OTHER` if it was met before, which
 * is left to Python. The stack and what it is part of refer to it. */
static int
is_new(Tokens *self, PyObject *x)
{
    int found = Py_REFCNT(x) <= 2 ? 1 : meet(&self->met, x);
    if (found < 0)
        PyErr_NoMemory();
    return found < 0 ? -1 : found ? IS_WRITTEN : IS_OTHER;
}

static int
take_items(Tokens *self, PyObject *x, PyObject *token)
{
    int is_list = PyList_Check(x);
    Py_ssize_t length = is_list ? PyList_Size(x) : PyTuple_Size(x), first = self->count;
    int is_empty = length == 0 && PyTuple_CheckExact(x); /* there is one, met many times */
    int written = is_empty ? IS_WRITTEN : is_new(self, x);
    if (written == IS_WRITTEN)
        written = add_token(self, token != NULL ? Py_NewRef(token)
                                                : Py_BuildValue("(OnO)", Py_TYPE(x), length,
                                                                Py_None));
    for (Py_ssize_t i = 0; written == IS_WRITTEN && i < length; i++)
        written = push_part(self, is_list ? PyList_GetItem(x, i) : PyTuple_GetItem(x, i));
    turn_parts(self, first);
    return written;
}

static int
take_dict(Tokens *self, PyObject *x)
{
    int written = is_new(self, x);
    Py_ssize_t first = self->count, length = PyDict_Size(x);
    PyObject *key, *value, *names = written == IS_WRITTEN ? PyTuple_New(length) : NULL;
    if (names == NULL)
        return written == IS_WRITTEN ? -1 : written;
    PyObject *keys = PyDict_Keys(x);
    for (Py_ssize_t i = 0; written == IS_WRITTEN && i < length; i++) {
        PyObject *name = keys == NULL ? NULL : PyList_GetItem(keys, i);
        if (name != NULL && !PyUnicode_CheckExact(name)) {
            written = IS_OTHER;
            break;
        }
        name = name == NULL ? NULL : PyTuple_Pack(2, (PyObject *)&PyUnicode_Type, name);
        if (name == NULL || PyTuple_SetItem(names, i, name) < 0)
            written = -1;
    }
    Py_XDECREF(keys);
    for (Py_ssize_t at = 0; written == IS_WRITTEN && PyDict_Next(x, &at, &key, &value);)
        written = push_part(self, value);
    if (written == IS_WRITTEN)
        written = add_token(self, Py_BuildValue("(On(O))", Py_TYPE(x), length, names));
    Py_DECREF(names);
    turn_parts(self, first);
    return written;
}

/* Takes the attributes of an object if these are the ones that its class is known for. */
static int
take_attributes(Tokens *self, PyObject *x, PyObject *token, PyObject *names, int is_container)
{
    int written = is_new(self, x);
    PyObject *held = written == IS_WRITTEN ? PyObject_GenericGetDict(x, NULL) : NULL;
    if (held == NULL)
        return written == IS_WRITTEN ? -1 : written;
    Py_ssize_t first = self->count, i = 0, length = PyTuple_Size(names);
    if (!is_container && (self->outside < 0 || first < self->outside))
        self->outside = first;
    PyObject *name, *value;
    if (PyDict_Size(held) != length)
        written = IS_OTHER;
    for (Py_ssize_t at = 0; written == IS_WRITTEN && PyDict_Next(held, &at, &name, &value); i++)
        written = PyTuple_GetItem(names, i) == name ? push_part(self, value) : IS_OTHER;
    Py_DECREF(held);
    turn_parts(self, first);
    return written == IS_WRITTEN ? add_token(self, Py_NewRef(token)) : written;
}

static int
take_array(Tokens *self, PyObject *x)
{
    int written = self->outside >= 0 ? IS_OTHER : is_new(self, x);
    PyObject *dtype = written == IS_WRITTEN ? PyObject_GetAttr(x, self->dtype_name) : NULL;
    if (dtype == NULL)
        return written == IS_WRITTEN ? -1 : written;
    PyObject *in_jax = PyDict_GetItemWithError(self->dtypes, dtype);
    Py_DECREF(dtype);
    if (in_jax == NULL)
        return PyErr_Occurred() ? -1 : IS_OTHER;
    PyObject *shape = PyObject_GetAttr(x, self->shape_name);
    if (shape == NULL)
        return -1;
    written = add_token(self, PyTuple_Pack(4, self->array, shape, in_jax, Py_False));
    Py_DECREF(shape);
    return written == IS_WRITTEN && PyList_Append(self->arrays, x) < 0 ? -1 : written;
}

static int
take_scalar(Tokens *self, PyObject *x)
{
    PyObject *dtype = PyObject_GetAttr(x, self->dtype_name), *token = NULL;
    PyObject *bytes = dtype == NULL ? NULL : PyObject_CallMethodObjArgs(x, self->bytes_name, NULL);
    if (bytes != NULL)
        token = PyTuple_Pack(3, (PyObject *)Py_TYPE(x), dtype, bytes);
    Py_XDECREF(dtype);
    Py_XDECREF(bytes);
    return add_token(self, token);
}

/* Takes an object as its class is described; `IS_LEFT` if that is to be done first. */
static int
take_object(Tokens *self, PyObject *x)
{
    PyObject *way = PyDict_GetItemWithError(self->ways, (PyObject *)Py_TYPE(x));
    if (way == NULL || way == Py_None)
        return PyErr_Occurred() ? -1 : way == NULL ? IS_LEFT : IS_OTHER;
    Py_INCREF(way); /* which others may forget while Python code runs */
    PyObject *token, *names;
    int how, written = IS_OTHER;
    if (!PyArg_ParseTuple(way, "iOO", &how, &token, &names))
        written = -1;
    else if (how == SCALAR)
        written = take_scalar(self, x);
    else if (how == LEAF)
        written = add_token(self, PyObject_CallFunctionObjArgs(self->typed, x, NULL));
    else if (how != NAMED)
        written = take_attributes(self, x, token, names, how == FIELDS);
    else if (PyTuple_Size(x) == PyTuple_Size(names))
        written = take_items(self, x, token);
    Py_DECREF(way);
    return written;
}

static int
take_part(Tokens *self, PyObject *x)
{
    if (PyLong_CheckExact(x) || PyUnicode_CheckExact(x) || PyBool_Check(x) || x == Py_None)
        return add_token(self, PyTuple_Pack(2, (PyObject *)Py_TYPE(x), x));
    if (PyFloat_CheckExact(x)) {
        double number = PyFloat_AsDouble(x);
        return add_token(self, Py_BuildValue("(OOy#)", Py_TYPE(x), Py_None, (char *)&number,
                                             (Py_ssize_t)sizeof number));
    }
    if (PyTuple_CheckExact(x) || PyList_CheckExact(x))
        return take_items(self, x, NULL);
    if ((PyObject *)Py_TYPE(x) == self->ndarray)
        return take_array(self, x);
    return PyDict_CheckExact(x) ? take_dict(self, x) : take_object(self, x);
}

/* instance_tokens(instance, ways, (numpy.ndarray, dtypes in JAX by dtype, typed)): (tokens, arrays);
 * None if they are left to Python, or (an object,) whose class has to be described first. */
PyObject *
instance_tokens(PyObject *module, PyObject *args)
{
    (void)module;
    Tokens self = {.outside = -1};
    PyObject *instance, *result = NULL, *missing = NULL;
    if (!PyArg_ParseTuple(args, "OO!(OO!O)", &instance, &PyDict_Type, &self.ways, &self.ndarray,
                          &PyDict_Type, &self.dtypes, &self.typed))
        return NULL;
    self.tokens = PyList_New(0);
    self.arrays = PyList_New(0);
    self.array = PyUnicode_InternFromString("array");
    self.dtype_name = PyUnicode_InternFromString("dtype");
    self.shape_name = PyUnicode_InternFromString("shape");
    self.bytes_name = PyUnicode_InternFromString("tobytes");
    int written = PyErr_Occurred() ? -1 : push_part(&self, instance);
    while (written == IS_WRITTEN && self.count > 0) {
        if (self.count <= self.outside)
            self.outside = -1;
        PyObject *x = self.stack[--self.count];
        written = take_part(&self, x);
        if (written == IS_LEFT)
            missing = PyTuple_Pack(1, x);
        Py_DECREF(x);
    }
    if (written == IS_WRITTEN) {
        PyObject *tokens = PyList_AsTuple(self.tokens);
        result = tokens == NULL ? NULL : PyTuple_Pack(2, tokens, self.arrays);
        Py_XDECREF(tokens);
    } else if (written != -1)
        result = written == IS_LEFT ? missing : Py_NewRef(Py_None);
    while (self.count > 0)
        Py_DECREF(self.stack[--self.count]);
    free(self.stack);
    free(self.met.items);
    Py_XDECREF(self.tokens);
    Py_XDECREF(self.arrays);
    Py_XDECREF(self.array);
    Py_XDECREF(self.dtype_name);
    Py_XDECREF(self.shape_name);
    Py_XDECREF(self.bytes_name);
    return result;
}
