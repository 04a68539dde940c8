/* Recording calls of cells: the twin of `_record/fast_path.py`, which says what is done and why.
 *
 * A call that this does not know, and arguments that are rarer than symbols, numbers, arrays,
 * states and lists of these, are left to the Python of the same name, once the references that were
 * written are taken back.
 *
 * Python code may run wherever objects are made or let go, and may change the dictionaries. So
 * whatever is used after that is held by a reference of its own.
 */

#include "core.h"

typedef struct {
    PyObject_HEAD
    PyObject *recorder, *result, *known, *computed, *kept, *numbers, *arrays, *ndarray, *watched;
    PyObject *calls;
    PyObject *call_specs, *references, *input_group, *input_value; /* lists */
    PyObject *end, *python;
    PyObject *attributes; /* of the recorder */
    /* Descriptors of slots: of `result`, of call specs, and of cells. */
    PyObject *trace_slot, *index_slot, *type_slot, *id_slot, *results_slot, *tree_slot, *unit_slot;
    PyObject *closure_slot;
    descrgetfunc get_slot;
    descrsetfunc set_slot;
} FastPath;

static PyTypeObject *fast_path_type;
static PyObject *name_contents, *name_results;
static PyObject *name_num_values, *name_shape, *name_dtype, *name_copy, *name_symbol;

/* The value of a slot of an object of the class that has it. */
static PyObject *
slot(FastPath *self, PyObject *descriptor, PyObject *x)
{
    return self->get_slot(descriptor, x, (PyObject *)Py_TYPE(x));
}

/* A step in the tree of descriptions: takes over `place`. NULL without an error: not known. */
static PyObject *
step(PyObject *place, PyObject *token)
{
    PyObject *next = PyDict_GetItemWithError(place, token);
    Py_XINCREF(next);
    Py_DECREF(place);
    return next;
}

/* The same with a token that is taken over; NULL if there is none. */
static PyObject *
step_with(PyObject *place, PyObject *token)
{
    if (token == NULL) {
        Py_DECREF(place);
        return NULL;
    }
    PyObject *next = step(place, token);
    Py_DECREF(token);
    return next;
}

static int
append_taken(PyObject *list, PyObject *item)
{
    if (item == NULL)
        return -1;
    int failed = PyList_Append(list, item);
    Py_DECREF(item);
    return failed;
}

/* (types of the values, items) of options that are plain; NULL without an error if some is not. */
static PyObject *
options_token(PyObject *options)
{
    Py_ssize_t position = 0, i = 0, length = PyDict_Size(options);
    PyObject *name, *value, *kinds = PyTuple_New(length), *items = PyTuple_New(length);
    PyObject *token = NULL;
    if (kinds == NULL || items == NULL)
        goto done;
    while (PyDict_Next(options, &position, &name, &value)) {
        int is_plain = PyBool_Check(value) || PyLong_CheckExact(value) || value == Py_None ||
                       PyUnicode_CheckExact(value);
        if (!is_plain)
            goto done;
        PyObject *item = PyTuple_Pack(2, name, value);
        if (item == NULL)
            goto done;
        PyTuple_SetItem(items, i, item);
        PyTuple_SetItem(kinds, i++, Py_NewRef((PyObject *)Py_TYPE(value)));
    }
    token = PyTuple_Pack(2, kinds, items);
done:
    Py_XDECREF(kinds);
    Py_XDECREF(items);
    return token;
}

/* (token, index) of what is known by its id; an array that was computed becomes an input if it is
 * none yet. A new reference, or NULL: without an error, it is not known. */
static PyObject *
find_known(FastPath *self, PyObject *x, PyObject *id)
{
    PyObject *found = PyDict_GetItemWithError(self->known, id);
    if (found == NULL && !PyErr_Occurred() && PyDict_Contains(self->computed, id) == 1) {
        PyObject *symbol = PyObject_CallMethodObjArgs(self->recorder, name_symbol, x, NULL);
        if (symbol == NULL) {
            if (PyErr_ExceptionMatches(PyExc_KeyError) || PyErr_ExceptionMatches(PyExc_ValueError))
                PyErr_Clear(); /* as in Python: the slow path says what is wrong */
            return NULL;
        }
        Py_DECREF(symbol);
        found = PyDict_GetItemWithError(self->known, id);
    }
    return Py_XNewRef(found);
}

/* Steps over a symbol or something with a token of its own, and notes what it refers to.
 * `*is_referred` is 0 if `x` is neither; then `place` is as it was. */
static PyObject *
step_over_reference(FastPath *self, PyObject *place, PyObject *x, int *is_referred)
{
    *is_referred = 1;
    if ((PyObject *)Py_TYPE(x) == self->result) {
        PyObject *recorder = slot(self, self->trace_slot, x);
        if (recorder == NULL)
            goto failed;
        Py_DECREF(recorder); /* the symbol holds it */
        if (recorder == self->recorder) {
            place = step_with(place, slot(self, self->type_slot, x));
            if (place == NULL)
                return NULL;
            PyObject *index = slot(self, self->index_slot, x);
            if (append_taken(self->references, index) < 0)
                goto failed;
            return place;
        }
    }
    PyObject *id = PyLong_FromVoidPtr(x);
    if (id == NULL)
        goto failed;
    PyObject *found = find_known(self, x, id);
    Py_DECREF(id);
    if (found == NULL) {
        if (PyErr_Occurred())
            goto failed;
        *is_referred = 0;
        return place;
    }
    place = step(place, PyTuple_GetItem(found, 0));
    PyObject *index = PyTuple_GetItem(found, 1);
    if (place != NULL && index != Py_None && PyList_Append(self->references, index) < 0) {
        Py_DECREF(found);
        goto failed;
    }
    Py_DECREF(found);
    return place;
failed:
    Py_DECREF(place);
    return NULL;
}

/* Steps over a tuple or list of references. */
static PyObject *
step_over_parts(FastPath *self, PyObject *place, PyObject *x)
{
    int is_tuple = PyTuple_CheckExact(x), is_referred;
    Py_ssize_t length = is_tuple ? PyTuple_Size(x) : PyList_Size(x);
    place = step_with(place, Py_BuildValue("(On)", Py_TYPE(x), length));
    for (Py_ssize_t i = 0; place != NULL && i < length; i++) {
        PyObject *part = is_tuple ? PyTuple_GetItem(x, i) : PyList_GetItem(x, i);
        if (part == NULL) { /* the list has become shorter */
            Py_DECREF(place);
            return NULL;
        }
        Py_INCREF(part);
        place = step_over_reference(self, place, part, &is_referred);
        Py_DECREF(part);
        if (place != NULL && !is_referred) {
            Py_DECREF(place);
            return NULL;
        }
    }
    return place;
}

/* Steps over an input: takes over `place`, and `found`, (input group, token), which may be NULL. */
static PyObject *
step_over_input(FastPath *self, PyObject *place, PyObject *found, PyObject *value)
{
    PyObject *next = NULL;
    if (found != NULL && value != NULL)
        next = step(Py_NewRef(place), PyTuple_GetItem(found, 1));
    if (next != NULL) {
        int failed = PyList_Append(self->input_group, PyTuple_GetItem(found, 0)) < 0 ||
                     PyList_Append(self->input_value, value) < 0;
        if (!failed) {
            PyObject *reference = PyLong_FromSsize_t(-PyList_Size(self->input_group));
            failed = append_taken(self->references, reference) < 0;
        }
        if (failed)
            Py_CLEAR(next);
    }
    Py_DECREF(place);
    Py_XDECREF(found);
    return next;
}

static PyObject *
step_over_number(FastPath *self, PyObject *place, PyObject *x)
{
    PyObject *found = PyDict_GetItemWithError(self->numbers, (PyObject *)Py_TYPE(x));
    return step_over_input(self, place, Py_XNewRef(found), x);
}

/* Steps over an array of NumPy; it is copied, since it may change before it is read. */
static PyObject *
step_over_array(FastPath *self, PyObject *place, PyObject *x)
{
    PyObject *shape = PyObject_GetAttr(x, name_shape), *dtype = PyObject_GetAttr(x, name_dtype);
    PyObject *key = shape == NULL || dtype == NULL ? NULL : PyTuple_Pack(2, shape, dtype);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(self->arrays, key), *copy = NULL;
    Py_XINCREF(found);
    if (found != NULL)
        copy = PyObject_CallMethodObjArgs(x, name_copy, NULL);
    place = step_over_input(self, place, found, copy);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(key);
    Py_XDECREF(copy);
    return place;
}

/* Steps over an argument; NULL without an error: it is left to Python. */
static PyObject *
step_over(FastPath *self, PyObject *place, PyObject *x)
{
    if (PyLong_CheckExact(x) || PyFloat_CheckExact(x))
        return step_over_number(self, place, x);
    int is_referred;
    place = step_over_reference(self, place, x, &is_referred);
    if (place == NULL || is_referred)
        return place;
    if ((PyObject *)Py_TYPE(x) == self->ndarray)
        return step_over_array(self, place, x);
    if (PyTuple_CheckExact(x) || PyList_CheckExact(x)) {
        PyObject *id = PyLong_FromVoidPtr(x);
        int may_change = id == NULL ? -1 : PyDict_Contains(self->watched, id);
        Py_XDECREF(id);
        if (may_change == 0)
            return step_over_parts(self, place, x);
    }
    Py_DECREF(place);
    return NULL;
}

/* The way in which a call like this was recorded before; NULL without an error: left to Python. */
static PyObject *
find_call_spec(FastPath *self, PyObject *cell, PyObject *args, PyObject *options)
{
    PyObject *place = step(Py_NewRef(self->calls), cell);
    if (place != NULL && PyDict_Size(options) > 0)
        place = step_with(place, options_token(options));
    if (place == NULL)
        return NULL;
    PyObject *closure = slot(self, self->closure_slot, cell);
    Py_ssize_t length = closure == NULL ? -1 : PyTuple_Size(closure);
    if (length < 0)
        Py_CLEAR(place);
    for (Py_ssize_t i = 0; place != NULL && i < length; i++) {
        PyObject *x = PyObject_GetAttr(PyTuple_GetItem(closure, i), name_contents);
        if (x == NULL && PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Clear(); /* a name that is not assigned yet */
        place = step_with(place, x == NULL ? NULL : PyLong_FromVoidPtr(x));
        Py_XDECREF(x);
    }
    Py_XDECREF(closure);
    length = PyTuple_Size(args);
    for (Py_ssize_t i = 0; place != NULL && i < length; i++)
        place = step_over(self, place, PyTuple_GetItem(args, i));
    if (place != NULL)
        place = step(place, self->end);
    return place;
}

/* A symbol for a result: `index` is an int, `kind` the id of its type. */
static PyObject *
make_result(FastPath *self, PyObject *index, PyObject *kind)
{
    PyObject *x = PyType_GenericAlloc((PyTypeObject *)self->result, 0);
    if (x != NULL && (self->set_slot(self->trace_slot, x, self->recorder) < 0 ||
                      self->set_slot(self->index_slot, x, index) < 0 ||
                      self->set_slot(self->type_slot, x, kind) < 0))
        Py_CLEAR(x);
    return x;
}

/* A tuple of results from number `first` on, known as a whole by the token `unit`. */
static PyObject *
make_tuple(FastPath *self, PyObject *first, PyObject *kinds, PyObject *unit)
{
    Py_ssize_t length = PyTuple_Size(kinds), number = PyLong_AsSsize_t(first);
    PyObject *results = PyTuple_New(length);
    for (Py_ssize_t i = 0; results != NULL && i < length; i++) {
        PyObject *index = i == 0 ? Py_NewRef(first) : PyLong_FromSsize_t(number + i);
        PyObject *x = index == NULL ? NULL : make_result(self, index, PyTuple_GetItem(kinds, i));
        Py_XDECREF(index);
        if (x == NULL)
            Py_CLEAR(results);
        else
            PyTuple_SetItem(results, i, x);
    }
    if (results == NULL)
        return NULL;
    PyObject *id = PyLong_FromVoidPtr(results), *reference = PyTuple_Pack(2, unit, first);
    if (id == NULL || reference == NULL || PyDict_SetItem(self->known, id, reference) < 0 ||
        PyList_Append(self->kept, results) < 0)
        Py_CLEAR(results);
    Py_XDECREF(id);
    Py_XDECREF(reference);
    return results;
}

/* Writes the node of a call whose references are written, and returns its results. */
static PyObject *
write_node(FastPath *self, PyObject *call_spec)
{
    PyObject *id = slot(self, self->id_slot, call_spec);
    PyObject *kinds = slot(self, self->results_slot, call_spec);
    PyObject *tree = slot(self, self->tree_slot, call_spec);
    PyObject *unit = slot(self, self->unit_slot, call_spec);
    PyObject *first = PyDict_GetItemWithError(self->attributes, name_num_values);
    PyObject *next = NULL, *results = NULL;
    Py_XINCREF(first);
    if (id == NULL || kinds == NULL || tree == NULL || unit == NULL || first == NULL)
        goto done;
    next = PyLong_FromSsize_t(PyLong_AsSsize_t(first) + PyTuple_Size(kinds));
    if (next == NULL || PyErr_Occurred() || PyList_Append(self->call_specs, id) < 0 ||
        PyDict_SetItem(self->attributes, name_num_values, next) < 0)
        goto done;
    if (tree == Py_None)
        results = make_result(self, first, PyTuple_GetItem(kinds, 0));
    else if (unit == Py_None)
        results = PyObject_CallMethodObjArgs(self->recorder, name_results, call_spec, first, NULL);
    else
        results = make_tuple(self, first, kinds, unit);
done:
    Py_XDECREF(id);
    Py_XDECREF(kinds);
    Py_XDECREF(tree);
    Py_XDECREF(unit);
    Py_XDECREF(first);
    Py_XDECREF(next);
    return results;
}

/* call_cell(cell, args, options): records a call and returns its results. */
static PyObject *
call_cell(PyObject *object, PyObject *const *argv, Py_ssize_t argc)
{
    FastPath *self = (FastPath *)object;
    if (argc != 3 || !PyTuple_Check(argv[1]) || !PyDict_Check(argv[2])) {
        PyErr_SetString(PyExc_TypeError, "expected a cell, a tuple and a dict");
        return NULL;
    }
    Py_ssize_t before = PyList_Size(self->references);
    PyObject *call_spec = find_call_spec(self, argv[0], argv[1], argv[2]);
    if (call_spec != NULL && call_spec != Py_None) {
        PyObject *results = write_node(self, call_spec);
        Py_DECREF(call_spec);
        return results;
    }
    Py_XDECREF(call_spec);
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback); /* the function may catch it and go on */
    Py_ssize_t now = PyList_Size(self->references); /* inputs that nobody reads do no harm */
    int failed = now > before && PyList_SetSlice(self->references, before, now, NULL) < 0;
    if (kind != NULL)
        PyErr_Restore(kind, value, traceback);
    if (failed || kind != NULL)
        return NULL;
    return PyObject_CallFunctionObjArgs(self->python, argv[0], argv[1], argv[2], NULL);
}

#define EACH(visit)                                                                               \
    visit(recorder) visit(result) visit(known) visit(computed) visit(kept) visit(numbers)         \
    visit(arrays) visit(ndarray) visit(watched) visit(calls) visit(call_specs) visit(references)  \
    visit(input_group) visit(input_value) visit(end) visit(python) visit(attributes)              \
    visit(trace_slot) visit(index_slot) visit(type_slot) visit(id_slot) visit(results_slot)       \
    visit(tree_slot) visit(unit_slot) visit(closure_slot)

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    FastPath *self = (FastPath *)object;
    Py_VISIT(Py_TYPE(object));
#define VISIT(member) Py_VISIT(self->member);
    EACH(VISIT)
    return 0;
}

static int
clear(PyObject *object)
{
    FastPath *self = (FastPath *)object;
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

/* Takes the descriptor of a slot of a class; 0 if it is one. */
static int
take_slot(FastPath *self, PyObject *class, const char *name, PyObject **descriptor)
{
    *descriptor = PyObject_GetAttrString(class, name);
    if (*descriptor == NULL)
        return -1;
    descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(*descriptor), Py_tp_descr_get);
    descrsetfunc set = (descrsetfunc)PyType_GetSlot(Py_TYPE(*descriptor), Py_tp_descr_set);
    int is_first = self->get_slot == NULL;
    if (get == NULL || set == NULL || (!is_first && get != self->get_slot)) {
        PyErr_Format(PyExc_TypeError, "%R has no slot `%s`", class, name);
        return -1;
    }
    self->get_slot = get;
    self->set_slot = set;
    return 0;
}

/* fast_path(recorder, (class of results, of call specs, of cells, of arrays), known, ..., python):
 * see `FastPath`. */
PyObject *
make_fast_path(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *call_spec, *cell;
    FastPath *self = (FastPath *)PyType_GenericAlloc(fast_path_type, 0);
    if (self == NULL)
        return NULL;
    PyObject *object = (PyObject *)self, *method = NULL;
    if (!PyArg_ParseTuple(
            args, "O(O!OOO)O!O!O!O!O!O!O!O!O!O!O!OO", &self->recorder, &PyType_Type,
            &self->result, &call_spec, &cell, &self->ndarray, &PyDict_Type, &self->known,
            &PyDict_Type, &self->computed, &PyList_Type, &self->kept, &PyDict_Type, &self->numbers,
            &PyDict_Type, &self->arrays, &PyDict_Type, &self->watched, &PyDict_Type, &self->calls,
            &PyList_Type, &self->call_specs, &PyList_Type, &self->references, &PyList_Type,
            &self->input_group, &PyList_Type, &self->input_value, &self->end, &self->python)) {
#define FORGET(member) self->member = NULL; /* borrowed so far */
        EACH(FORGET)
        Py_DECREF(object);
        return NULL;
    }
#define HOLD(member) Py_XINCREF(self->member);
    EACH(HOLD)
    self->attributes = PyObject_GenericGetDict(self->recorder, NULL);
    if (self->attributes != NULL &&
        take_slot(self, self->result, "_trace", &self->trace_slot) == 0 &&
        take_slot(self, self->result, "index", &self->index_slot) == 0 &&
        take_slot(self, self->result, "type", &self->type_slot) == 0 &&
        take_slot(self, call_spec, "id", &self->id_slot) == 0 &&
        take_slot(self, call_spec, "results", &self->results_slot) == 0 &&
        take_slot(self, call_spec, "tree", &self->tree_slot) == 0 &&
        take_slot(self, call_spec, "unit", &self->unit_slot) == 0 &&
        take_slot(self, cell, "closure", &self->closure_slot) == 0)
        method = PyObject_GetAttrString(object, "call_cell");
    Py_DECREF(object);
    return method;
}

static PyMethodDef methods[] = {
    {"call_cell", (PyCFunction)(void (*)(void))call_cell, METH_FASTCALL, NULL},
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
    name_contents = PyUnicode_InternFromString("cell_contents");
    name_results = PyUnicode_InternFromString("results");
    name_shape = PyUnicode_InternFromString("shape");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_symbol = PyUnicode_InternFromString("symbol");
    name_copy = PyUnicode_InternFromString("copy");
    name_num_values = PyUnicode_InternFromString("num_values");
    return fast_path_type == NULL || PyErr_Occurred() ? -1 : 0;
}
