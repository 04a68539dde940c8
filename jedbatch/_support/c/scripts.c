/* Values that an instance asks for and that are there already: the twin of
 * `_control_flow/scripts.py`, which says what a script is.
 *
 * `if`, `while`, `int()` and `float()` on a symbol come here first, without a frame of Python: they
 * are most of what instances do that go on as foreseen. Whatever is not foreseen, or needs more than
 * to be read, is left to the Python of the same name.
 */

#include "slots.h"
#include "steps.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

enum { STAYS, WAS_READ, COUNTS_ON }; /* how a number is foreseen */

typedef struct {
    Py_ssize_t place;
    int how;
    PyObject *latest;
    long long number, by; /* if it counts on */
} Foreseen;

typedef struct {
    PyObject_HEAD
    Ints *columns[NUM_SIZES];
    PyObject *input_value, *rows, *recording;
    Py_buffer scalars, table; /* the rows, if they are numbers; the table of steps */
    char kind;                /* of these, as in `struct` */
    Step *step;             /* NULL before it begins */
    Foreseen *numbers;
    Py_ssize_t num_numbers;
    long long bound; /* of numbers; -1: none */
    Py_ssize_t first, stride, count, done;
    int64_t first_input, first_value, first_read, num_inputs, num_values;
    char same, ended;
} Script;

static PyTypeObject *script_type;
static PyObject *name_script, *name_recorder;
enum { BOOL, INT, INDEX, FLOAT, NUM_CONVERSIONS };
static struct {
    PyObject *value, *in_python[NUM_CONVERSIONS]; /* the class of values, and its methods */
    Py_ssize_t trace_at, index_at;
} deciding;

/* The value at the end of a step, as an array. */
static PyObject *
value_of_step(Script *self, Py_ssize_t step)
{
    PyObject *row = PyLong_FromSsize_t(self->first + step * self->stride);
    PyObject *index = row == NULL ? NULL : PyTuple_Pack(2, row, Py_Ellipsis);
    PyObject *value = index == NULL ? NULL : PyObject_GetItem(self->rows, index);
    Py_XDECREF(row);
    Py_XDECREF(index);
    return value;
}

/* Whether two things are one, or equal numbers of one type that differ in nothing; -1 with an
 * error. */
static int
is_same_number(PyObject *a, PyObject *b)
{
    PyTypeObject *type = Py_TYPE(a);
    if (a == b)
        return 1;
    if (type != Py_TYPE(b) ||
        (type != &PyBool_Type && type != &PyLong_Type && type != &PyFloat_Type))
        return 0;
    if (type != &PyFloat_Type)
        return PyObject_RichCompareBool(a, b, Py_EQ);
    double x = PyFloat_AsDouble(a), y = PyFloat_AsDouble(b);
    return x == y && signbit(x) == signbit(y);
}

static int
is_number(PyObject *x)
{
    return Py_TYPE(x) == &PyBool_Type || Py_TYPE(x) == &PyLong_Type ||
           Py_TYPE(x) == &PyFloat_Type;
}

/* Whether the numbers of the step that ends are those foreseen; -1 with an error. */
static int
has_numbers(Script *self)
{
    int64_t first = self->first_input + self->done * self->num_inputs;
    for (Py_ssize_t i = 0; i < self->num_numbers; i++) {
        const Foreseen *number = &self->numbers[i];
        PyObject *x = PyList_GetItem(self->input_value, first + number->place);
        PyObject *expected = NULL;
        if (x == NULL)
            return -1;
        if (number->how == STAYS) {
            expected = Py_NewRef(number->latest);
        } else if (number->how == COUNTS_ON) {
            expected = PyLong_FromLongLong(number->number + (self->done + 1) * number->by);
        } else if (!is_number(x)) {
            expected = Py_NewRef(number->latest);
        } else {
            PyObject *value = value_of_step(self, self->done - 1);
            PyObject *type = (PyObject *)Py_TYPE(x);
            if (value != NULL)
                expected = PyObject_CallFunctionObjArgs(type, value, NULL);
            Py_XDECREF(value);
        }
        if (expected == NULL)
            return -1;
        int same = is_same_number(x, expected);
        Py_DECREF(expected);
        if (same <= 0)
            return same;
        if (number->how == STAYS || self->bound < 0 || Py_TYPE(x) != &PyLong_Type)
            continue;
        int overflow;
        long long row = PyLong_AsLongLongAndOverflow(x, &overflow);
        if (row == -1 && PyErr_Occurred())
            return -1;
        if (overflow != 0 || row < 0 || row >= self->bound)
            return 0;
    }
    return 1;
}

/* The step at whose end a value is asked for, if it is as foreseen and the value is there; -1 if
 * not, from then on; -2 with an error. */
static Py_ssize_t
find_step(Script *self, int64_t key)
{
    if (self->ended || self->step == NULL)
        return -1;
    self->ended = 1;
    self->same = (char)end_step(self->columns, self->step, key);
    if (!self->same || self->done == self->count)
        return -1;
    if (self->done == 0) {
        self->num_inputs = self->step->counts[INPUTS];
        self->num_values = self->step->counts[VALUES];
        self->first_read = key;
    }
    int found = has_numbers(self);
    if (found <= 0)
        return found < 0 ? -2 : -1;
    self->ended = 0;
    return self->done++;
}

/* read(key): the value of that number, at the end of a step; None if it is not there. */
static PyObject *
read_value(PyObject *object, PyObject *given)
{
    Script *self = (Script *)object;
    long long key = PyLong_AsLongLong(given);
    if (key == -1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t step = find_step(self, key);
    if (step >= 0)
        return value_of_step(self, step);
    return step == -1 ? Py_NewRef(Py_None) : NULL;
}

/* value(key): the value of that number, if it was read; or None. */
static PyObject *
known_value(PyObject *object, PyObject *given)
{
    Script *self = (Script *)object;
    long long key = PyLong_AsLongLong(given);
    if (key == -1 && PyErr_Occurred())
        return NULL;
    int64_t behind = key - self->first_read;
    if (self->done == 0 || behind < 0 || self->num_values <= 0 ||
        behind % self->num_values != 0 || behind / self->num_values >= self->done)
        return Py_NewRef(Py_None);
    return value_of_step(self, (Py_ssize_t)(behind / self->num_values));
}

/* begin((table,), fibre): the turn of the fibre begins. */
static PyObject *
begin_script(PyObject *object, PyObject *args)
{
    Script *self = (Script *)object;
    PyObject *table;
    Py_ssize_t fiber, width = sizeof(Step) / sizeof(int64_t);
    if (!PyArg_ParseTuple(args, "On", &table, &fiber))
        return NULL;
    if (self->step != NULL) {
        PyErr_SetString(PyExc_ValueError, "a script begins once");
        return NULL;
    }
    if (PyObject_GetBuffer(table, &self->table, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    if (self->table.itemsize != sizeof(int64_t) || fiber < 0 ||
        fiber >= self->table.len / (Py_ssize_t)sizeof(Step) || self->columns[COUNTER]->count < 1) {
        PyBuffer_Release(&self->table);
        PyErr_SetString(PyExc_ValueError, "there is no such step");
        return NULL;
    }
    self->step = (Step *)((int64_t *)self->table.buf + fiber * width);
    self->first_input = self->columns[GROUPS]->count;
    self->first_value = self->columns[COUNTER]->items[0];
    return Py_NewRef(Py_None);
}

static int
visit_all(PyObject *object, visitproc visit, void *arg)
{
    Script *self = (Script *)object;
    Py_VISIT(Py_TYPE(object));
    for (int i = 0; i < NUM_SIZES; i++)
        Py_VISIT((PyObject *)self->columns[i]);
    Py_VISIT(self->input_value);
    Py_VISIT(self->rows);
    Py_VISIT(self->recording);
    for (Py_ssize_t i = 0; i < self->num_numbers; i++)
        Py_VISIT(self->numbers[i].latest);
    return 0;
}

static int
clear_all(PyObject *object)
{
    Script *self = (Script *)object;
    self->step = NULL;
    self->count = self->done = 0;
    if (self->scalars.obj != NULL)
        PyBuffer_Release(&self->scalars);
    if (self->table.obj != NULL)
        PyBuffer_Release(&self->table);
    for (int i = 0; i < NUM_SIZES; i++)
        Py_CLEAR(self->columns[i]);
    Py_CLEAR(self->input_value);
    Py_CLEAR(self->rows);
    Py_CLEAR(self->recording);
    while (self->num_numbers > 0)
        Py_DECREF(self->numbers[--self->num_numbers].latest);
    free(self->numbers);
    self->numbers = NULL;
    return 0;
}

static void
dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_all(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Takes what is foreseen of the numbers that an instance brings; -1 with an error. */
static int
take_numbers(Script *self, PyObject *numbers)
{
    Py_ssize_t count = PyList_Size(numbers);
    self->numbers = calloc((size_t)(count > 0 ? count : 1), sizeof(Foreseen));
    if (self->numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Foreseen number;
        PyObject *one = PyList_GetItem(numbers, i);
        if (one == NULL || !PyArg_ParseTuple(one, "niOL", &number.place, &number.how,
                                             &number.latest, &number.by))
            return -1;
        number.number = number.how == COUNTS_ON ? PyLong_AsLongLong(number.latest) : 0;
        if (number.number == -1 && PyErr_Occurred())
            return -1;
        Py_INCREF(number.latest);
        self->numbers[self->num_numbers++] = number;
    }
    return 0;
}

/* Script((types of nodes, references, groups, counter), inputs, rows, (first, stride, count), numbers,
 * bound, recording). */
static PyObject *
make_script(PyTypeObject *type, PyObject *args, PyObject *options)
{
    (void)options;
    PyObject *numbers;
    Script *self = (Script *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    int parsed = PyArg_ParseTuple(
        args, "(O!O!O!O!)O!O(nnn)O!LO", ints_type, &self->columns[CALLS], ints_type,
        &self->columns[REFERENCES], ints_type, &self->columns[GROUPS], ints_type,
        &self->columns[COUNTER], &PyList_Type, &self->input_value, &self->rows, &self->first,
        &self->stride, &self->count, &PyList_Type, &numbers, &self->bound, &self->recording);
    if (!parsed) { /* what was taken is borrowed so far */
        for (int i = 0; i < NUM_SIZES; i++)
            self->columns[i] = NULL;
        self->input_value = self->rows = self->recording = NULL;
        Py_DECREF(self);
        return NULL;
    }
    for (int i = 0; i < NUM_SIZES; i++)
        Py_INCREF((PyObject *)self->columns[i]);
    Py_INCREF(self->input_value);
    Py_INCREF(self->rows);
    Py_INCREF(self->recording);
    if (take_numbers(self, numbers) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (PyObject_GetBuffer(self->rows, &self->scalars, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* rows of a type that Python does not know */
        return (PyObject *)self;
    }
    Py_ssize_t last = self->first + (self->count - 1) * self->stride;
    int fits = self->first >= 0 && self->stride >= 0 && self->scalars.ndim == 1 &&
               (self->count <= 0 || last < self->scalars.len / self->scalars.itemsize);
    if (fits && self->scalars.format != NULL && strlen(self->scalars.format) == 1 &&
        strchr("?bhilqfd", self->scalars.format[0]) != NULL)
        self->kind = self->scalars.format[0];
    else
        PyBuffer_Release(&self->scalars);
    return (PyObject *)self;
}

/* The script of the instance whose turn it is, by which a symbol is decided on; NULL if there is
 * none, or with an error. */
static Script *
find_script(PyObject *symbol)
{
    if ((PyObject *)Py_TYPE(symbol) != deciding.value)
        return NULL;
    PyObject *trace = *slot(symbol, deciding.trace_at);
    PyObject *script = trace == NULL ? NULL : PyObject_GetAttr(trace, name_script);
    if (script == NULL)
        return NULL;
    Script *self = Py_TYPE(script) == script_type ? (Script *)script : NULL;
    if (self != NULL && self->scalars.obj != NULL && self->step != NULL) {
        PyObject *recorder = PyObject_GetAttr(self->recording, name_recorder);
        if (recorder == trace) {
            Py_DECREF(recorder);
            return self;
        }
        Py_XDECREF(recorder);
    }
    Py_DECREF(script);
    return NULL;
}

/* Whether reading a number of some kind is all that a conversion takes. */
static int
is_read(int conversion, char kind)
{
    if (conversion == BOOL)
        return kind == '?';
    if (conversion == FLOAT)
        return kind == 'f' || kind == 'd';
    return kind != '?' && kind != 'f' && kind != 'd';
}

static PyObject *
read_number(const char *at, char kind)
{
    switch (kind) {
    case '?':
        return PyBool_FromLong(*at);
    case 'b':
        return PyLong_FromLong(*(const signed char *)at);
    case 'h':
        return PyLong_FromLong(*(const short *)at);
    case 'i':
        return PyLong_FromLong(*(const int *)at);
    case 'l':
        return PyLong_FromLong(*(const long *)at);
    case 'q':
        return PyLong_FromLongLong(*(const long long *)at);
    case 'f':
        return PyFloat_FromDouble(*(const float *)at);
    default:
        return PyFloat_FromDouble(*(const double *)at);
    }
}

static PyObject *
convert(PyObject *symbol, int conversion)
{
    Script *script = find_script(symbol);
    if (script != NULL) {
        PyObject *index = *slot(symbol, deciding.index_at), *answer = NULL;
        long long key = index == NULL ? -1 : PyLong_AsLongLong(index);
        Py_ssize_t step = -1;
        if (!PyErr_Occurred() && key >= script->step->now[VALUES] &&
            is_read(conversion, script->kind))
            step = find_step(script, key);
        if (step >= 0) {
            Py_ssize_t row = script->first + step * script->stride;
            const char *rows = script->scalars.buf;
            answer = read_number(rows + row * script->scalars.itemsize, script->kind);
        }
        Py_DECREF(script);
        if (answer != NULL)
            return answer;
    }
    if (PyErr_Occurred())
        return NULL;
    return PyObject_CallFunctionObjArgs(deciding.in_python[conversion], symbol, NULL);
}

#define CONVERSION(name, conversion)                                                              \
    static PyObject *name(PyObject *symbol, PyObject *nothing)                                    \
    {                                                                                             \
        (void)nothing;                                                                            \
        return convert(symbol, conversion);                                                       \
    }

CONVERSION(to_bool, BOOL)
CONVERSION(to_int, INT)
CONVERSION(to_index, INDEX)
CONVERSION(to_float, FLOAT)

static PyMethodDef conversions[NUM_CONVERSIONS] = {
    {"__bool__", to_bool, METH_NOARGS, "Returns whether the value of a symbol is true."},
    {"__int__", to_int, METH_NOARGS, "Returns the value of a symbol as an int."},
    {"__index__", to_index, METH_NOARGS, "Returns the value of a symbol as an index."},
    {"__float__", to_float, METH_NOARGS, "Returns the value of a symbol as a float."},
};

/* convert_by_scripts(class of symbols, class of values): gives the class of symbols methods that do
 * as its own, sooner where a script has the value. */
PyObject *
convert_by_scripts(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *symbol, *value;
    if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &symbol, &PyType_Type, &value))
        return NULL;
    if ((deciding.trace_at = find_slot(value, "_trace")) < 0 ||
        (deciding.index_at = find_slot(value, "index")) < 0)
        return NULL;
    Py_XDECREF(deciding.value);
    deciding.value = Py_NewRef(value);
    for (int i = 0; i < NUM_CONVERSIONS; i++) {
        PyObject *in_python = PyObject_GetAttrString(symbol, conversions[i].ml_name);
        PyObject *method = PyDescr_NewMethod((PyTypeObject *)symbol, &conversions[i]);
        int failed = in_python == NULL || method == NULL ||
                     PyObject_SetAttrString(symbol, conversions[i].ml_name, method) < 0;
        Py_XDECREF(method);
        Py_XDECREF(deciding.in_python[i]);
        deciding.in_python[i] = in_python;
        if (failed)
            return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"begin", begin_script, METH_VARARGS, NULL},
    {"read", read_value, METH_O, NULL},
    {"value", known_value, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"done", T_PYSSIZET, offsetof(Script, done), READONLY, NULL},
    {"first_value", T_LONGLONG, offsetof(Script, first_value), READONLY, NULL},
    {"same", T_BOOL, offsetof(Script, same), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_traverse, visit_all}, {Py_tp_clear, clear_all}, {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},    {Py_tp_members, members}, {Py_tp_new, make_script},
    {0, NULL},
};

static PyType_Spec spec = {
    "jedbatch._support.native_core.Script", sizeof(Script), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

int
init_scripts(PyObject *module)
{
    name_script = PyUnicode_InternFromString("script");
    name_recorder = PyUnicode_InternFromString("recorder");
    script_type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (script_type == NULL || PyErr_Occurred())
        return -1;
    return PyModule_AddObjectRef(module, "Script", (PyObject *)script_type);
}
