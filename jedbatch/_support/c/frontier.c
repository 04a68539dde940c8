/* Scheduling by heuristics and machines: the twin of `_schedule/frontier.py`, `heuristics.py`,
 * `encodings.py` and the loop of `policy.py`, which say what is computed and why.
 *
 * What the Python computes when it is asked for is kept up to date here: a node is looked at as it
 * becomes ready. No Python code runs on the way but that of numbers and tuples.
 */

#include <stdlib.h>
#include <string.h>

#include "core.h"

/* As `_schedule/compiled.py` numbers them. */
enum { AGENDA, HEIGHT, CRITICAL, SUFFICIENT };
enum { BASE, MOST, SORT, PHASE };
#define CODES 64

typedef struct {
    int32_t first;     /* of its ready nodes, which are linked; -1 if there is none */
    int32_t num_ready, num_left;
    int32_t tallest;   /* longest path from a ready node */
    int32_t num_tallest, num_turning;
    int64_t longest;   /* row of the longest chain that a ready node begins */
} Type;

typedef struct {
    Py_ssize_t num_nodes, num_edges, num_types;
    int32_t *waiting;                        /* N: makers that have not run */
    const int64_t *succ_ptr;                 /* N + 1 */
    const int32_t *succ, *node_type, *depth; /* M, N, N */
    const int32_t *height;                   /* N */
    const int32_t *chain;                    /* N: its row among those of its type */
    uint8_t *turns;                          /* N */
    int64_t *left_in_row, *first_row;        /* R; T + 1: nodes of one type and equal chain */
    int64_t *last_row;                       /* T */
    double *depth_sums;                      /* T */
    const int64_t *chain_of;                 /* T: row of `blockers`, or -1 */
    const uint8_t *relayed;                  /* T */
    int64_t *blockers, *num_next;            /* K * N; T */
    const int64_t *weight;                   /* N: as how many each counts; NULL if as one */
    int32_t *when;                           /* N: the batch of each node */
    int32_t *next;                           /* N: links of ready nodes */
    int32_t *stack;                          /* N */
    int32_t *ready;                          /* T: types with ready nodes, ascending */
    int64_t *codes;                          /* T: what is said about these */
    Type *types;                             /* T */
    int num_ready_types, looks, sums, chains;
} Frontier;

/* A machine, or a heuristic if there is no table. */
typedef struct {
    int heuristic, encoding;
    PyObject *table;        /* from codes to types, in the machine's numbers */
    const int64_t *numbers; /* of the types */
} Policy;

static int32_t
count_of(const Frontier *f, int32_t node)
{
    return f->weight == NULL ? 1 : (int32_t)f->weight[node];
}

static void
admit(Frontier *f, int32_t node)
{
    Type *type = &f->types[f->node_type[node]];
    int32_t count = count_of(f, node);
    f->next[node] = type->first;
    type->first = node;
    type->num_ready += count;
    if (!f->looks)
        return;
    int32_t height = f->height[node];
    if (height > type->tallest) {
        type->tallest = height;
        type->num_tallest = type->num_turning = 0;
    }
    if (height == type->tallest) {
        type->num_tallest += count;
        type->num_turning += f->turns[node] ? count : 0;
    }
    int64_t row = f->first_row[f->node_type[node]] + f->chain[node];
    f->left_in_row[row]--;
    if (row > type->longest)
        type->longest = row;
}

/* Nodes of type t ran: those that they alone kept from being next of their type are no longer. */
static void
release(Frontier *f, int32_t t, int32_t first, int32_t count)
{
    if (f->chain_of[t] < 0) {
        f->num_next[t] -= count;
        return;
    }
    int64_t *blockers = f->blockers + f->chain_of[t] * f->num_nodes;
    int64_t size = f->num_next[t] - count;
    for (int32_t node = first; node >= 0; node = f->next[node]) {
        Py_ssize_t depth = 0;
        f->stack[depth++] = node;
        while (depth > 0) {
            int32_t maker = f->stack[--depth];
            for (int64_t e = f->succ_ptr[maker]; e < f->succ_ptr[maker + 1]; e++) {
                int32_t reader = f->succ[e];
                if (--blockers[reader] != 0)
                    continue;
                if (f->node_type[reader] == t)
                    size += count_of(f, reader);
                else if (f->relayed[t])
                    f->stack[depth++] = reader;
            }
        }
    }
    f->num_next[t] = size;
}

/* Runs the ready nodes of type t; returns how many there were. */
static int32_t
run_type(Frontier *f, int32_t t, int32_t batch)
{
    Type *type = &f->types[t];
    int32_t first = type->first, num_nodes = 0;
    if (f->chains)
        release(f, t, first, type->num_ready);
    type->num_left -= type->num_ready;
    type->first = -1;
    type->num_ready = type->num_tallest = type->num_turning = 0;
    type->tallest = -1;
    type->longest = -1;
    int64_t depths = 0;
    for (int32_t node = first, after; node >= 0; node = after) {
        after = f->next[node]; /* `admit` writes that of others only */
        f->when[node] = batch;
        num_nodes++;
        if (f->sums)
            depths += (int64_t)f->depth[node] * count_of(f, node);
        for (int64_t e = f->succ_ptr[node]; e < f->succ_ptr[node + 1]; e++)
            if (--f->waiting[f->succ[e]] == 0)
                admit(f, f->succ[e]); /* those that do not run wait for ever */
    }
    if (f->sums)
        f->depth_sums[t] -= (double)depths;
    return num_nodes;
}

/* Whether all longest chains of the type that are left begin in ready nodes. */
static int
shortens(Frontier *f, int32_t t)
{
    while (f->left_in_row[f->last_row[t]] == 0)
        f->last_row[t]--;
    return f->types[t].longest > f->last_row[t];
}

static int
is_more_critical(Frontier *f, int32_t a, int32_t b)
{
    int a_shortens = shortens(f, a), b_shortens = shortens(f, b);
    const Type *x = &f->types[a], *y = &f->types[b];
    if (a_shortens != b_shortens)
        return a_shortens > b_shortens;
    if (x->tallest != y->tallest)
        return x->tallest > y->tallest;
    if (x->num_tallest != y->num_tallest)
        return x->num_tallest > y->num_tallest;
    return x->num_turning > y->num_turning;
}

static int
is_better(Frontier *f, int heuristic, int32_t a, int32_t b)
{
    const Type *x = &f->types[a], *y = &f->types[b];
    switch (heuristic) {
    case AGENDA:
        return f->depth_sums[a] / x->num_left < f->depth_sums[b] / y->num_left;
    case HEIGHT:
        return x->tallest > y->tallest;
    case CRITICAL:
        return is_more_critical(f, a, b);
    default:
        return (double)x->num_ready / (double)f->num_next[a] >
               (double)y->num_ready / (double)f->num_next[b];
    }
}

/* The best of the ready types, the smallest id among equals. */
static int32_t
choose(Frontier *f, int heuristic)
{
    int32_t best = f->ready[0];
    for (int i = 1; i < f->num_ready_types; i++)
        if (is_better(f, heuristic, f->ready[i], best))
            best = f->ready[i];
    return best;
}

/* What an encoding says about the ready type t (see `_schedule/encodings.py`). */
static int64_t
word(Frontier *f, int encoding, int32_t t, int32_t tallest, int32_t most)
{
    const Type *type = &f->types[t];
    if (encoding == BASE)
        return 0;
    if (encoding == MOST)
        return type->num_ready == most;
    if (encoding == SORT) {
        int64_t larger = 0;
        for (int i = 0; i < f->num_ready_types; i++)
            larger += f->types[f->ready[i]].num_ready > type->num_ready;
        return larger < CODES - 1 ? larger : CODES - 1;
    }
    int32_t gap = tallest - type->tallest;
    int64_t low = (gap >= 1) + (gap >= 2) + (gap >= 4), sure = shortens(f, t);
    int64_t turn = (type->num_turning > 0) + (type->num_turning == type->num_tallest);
    return 12 * low + (low < 3) * (6 * (type->num_tallest == most) + 2 * turn) + sure;
}

static int
ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The code of the frontier in a machine's terms, a tuple. */
static PyObject *
encode(Frontier *f, int encoding, const int64_t *numbers)
{
    int64_t *codes = f->codes;
    int32_t tallest = -1, most = 0;
    for (int i = 0; i < f->num_ready_types; i++) {
        const Type *type = &f->types[f->ready[i]];
        int32_t count = encoding == PHASE ? type->num_tallest : type->num_ready;
        tallest = type->tallest > tallest ? type->tallest : tallest;
        most = count > most ? count : most;
    }
    for (int i = 0; i < f->num_ready_types; i++)
        codes[i] = CODES * numbers[f->ready[i]] + word(f, encoding, f->ready[i], tallest, most);
    qsort(codes, f->num_ready_types, sizeof(int64_t), ascending);
    PyObject *code = PyTuple_New(f->num_ready_types);
    for (int i = 0; code != NULL && i < f->num_ready_types; i++) {
        PyObject *number = PyLong_FromLongLong(codes[i]);
        if (number == NULL)
            Py_CLEAR(code);
        else
            PyTuple_SetItem(code, i, number);
    }
    return code;
}

/* The type that the machine runs; -1 if it does not know the frontier, -2 on errors. */
static int32_t
look_up(Frontier *f, const Policy *policy)
{
    PyObject *code = encode(f, policy->encoding, policy->numbers);
    if (code == NULL)
        return -2;
    PyObject *found = PyDict_GetItemWithError(policy->table, code);
    int64_t run = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_DECREF(code);
    if (PyErr_Occurred())
        return -2;
    if (found == NULL)
        return -1;
    for (int i = 0; i < f->num_ready_types; i++)
        if (policy->numbers[f->ready[i]] == run)
            return f->ready[i];
    PyErr_Format(PyExc_ValueError, "the machine runs type %lld, which is not ready",
                 (long long)run);
    return -2;
}

/* Runs all nodes; appends the types of batches to a list. The batches left to the heuristic, or -1
 * on errors. */
static Py_ssize_t
run_all(Frontier *f, const Policy *policy, PyObject *batch_types)
{
    Py_ssize_t left = f->num_nodes, unseen = 0;
    for (int32_t batch = 0; left > 0; batch++) {
        f->num_ready_types = 0;
        for (int32_t t = 0; t < f->num_types; t++)
            if (f->types[t].num_ready > 0)
                f->ready[f->num_ready_types++] = t;
        if (f->num_ready_types == 0) {
            PyErr_SetString(PyExc_ValueError, "nodes of the graph wait for each other");
            return -1;
        }
        int32_t t = f->ready[0];
        if (f->num_ready_types > 1) {
            t = policy->table == Py_None ? -1 : look_up(f, policy);
            if (t == -2)
                return -1;
            unseen += t == -1;
            t = t == -1 ? choose(f, policy->heuristic) : t;
        }
        PyObject *number = PyLong_FromLong(t);
        int failed = number == NULL || PyList_Append(batch_types, number) < 0;
        Py_XDECREF(number);
        if (failed || (batch % 4096 == 4095 && PyErr_CheckSignals() < 0))
            return -1;
        left -= run_type(f, t, batch);
    }
    return unseen;
}

/* Counts the makers of each node, and finds which nodes turn. */
static void
look_at_edges(Frontier *f)
{
    for (Py_ssize_t i = 0; i < f->num_nodes; i++)
        for (int64_t e = f->succ_ptr[i]; e < f->succ_ptr[i + 1]; e++) {
            int32_t reader = f->succ[e];
            f->waiting[reader]++;
            if (f->looks && f->height[i] == f->height[reader] + 1 &&
                f->node_type[i] != f->node_type[reader])
                f->turns[i] = 1;
        }
}

/* Puts the nodes in rows; 0 if there was enough memory. */
static int
fill_rows(Frontier *f)
{
    int64_t *last = f->last_row, num_rows = 0;
    for (Py_ssize_t i = 0; i < f->num_nodes; i++)
        if (f->chain[i] > last[f->node_type[i]])
            last[f->node_type[i]] = f->chain[i];
    for (Py_ssize_t t = 0; t < f->num_types; t++) {
        f->first_row[t] = num_rows;
        num_rows += last[t] + 1;
        last[t] = num_rows - 1;
    }
    f->left_in_row = calloc(num_rows + 1, sizeof(int64_t));
    if (f->left_in_row == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < f->num_nodes; i++)
        f->left_in_row[f->first_row[f->node_type[i]] + f->chain[i]]++;
    for (Py_ssize_t t = 0; t < f->num_types; t++) /* never empty, before those of the type */
        f->left_in_row[f->first_row[t]]++;
    return 0;
}

/* Checks that edges and types are in range and takes the counts; 0 if all is well. */
static int
prepare(Frontier *f)
{
    for (Py_ssize_t i = 0; i < f->num_nodes; i++) {
        int64_t begin = f->succ_ptr[i], end = f->succ_ptr[i + 1];
        int is_valid = f->node_type[i] >= 0 && f->node_type[i] < f->num_types && begin <= end &&
                       begin >= 0 && end <= f->num_edges;
        is_valid = is_valid && (!f->looks || (f->chain[i] >= 0 && f->chain[i] <= f->num_nodes));
        if (!is_valid || (f->weight != NULL && (f->weight[i] < 1 || f->weight[i] > INT32_MAX)))
            goto invalid;
        f->types[f->node_type[i]].num_left += count_of(f, (int32_t)i);
    }
    for (Py_ssize_t e = 0; e < f->num_edges; e++)
        if (f->succ[e] < 0 || f->succ[e] >= f->num_nodes)
            goto invalid;
    look_at_edges(f);
    if (f->looks && fill_rows(f) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < f->num_nodes; i++)
        if (f->waiting[i] == 0)
            admit(f, (int32_t)i);
    return 0;
invalid:
    PyErr_SetString(PyExc_ValueError, "the graph has nodes, types or edges out of range");
    return -1;
}

/* The arrays that `schedule` gets, in this order. */
enum {
    SUCC_PTR, SUCC, NODE_TYPE, WHEN,                 /* always */
    HEIGHTS, CHAIN,                                  /* to look at heights and chains */
    DEPTH, DEPTH_SUMS,                               /* for `agenda` */
    CHAIN_OF, RELAYED, BLOCKERS, NUM_NEXT,           /* for `sufficient` */
    NUMBERS,                                         /* of a machine */
    WEIGHT,                                          /* where nodes count as several */
    NUM_ARRAYS
};
/* Bytes of their items, negative where they are written to. */
static const int item_sizes[NUM_ARRAYS] = {8, 4, 4, -4, 4, 4, 4, -8, 8, 1, -8, -8, 8, 8};

/* Whether the lengths of arrays fit each other. */
static int
fit(const Frontier *f, const Py_ssize_t *lengths)
{
    Py_ssize_t n = f->num_nodes, t = f->num_types;
    int fits = t > 0 && lengths[SUCC_PTR] == n + 1 && lengths[WHEN] == n &&
               (f->weight == NULL || lengths[WEIGHT] == n);
    if (fits && f->looks)
        fits = lengths[HEIGHTS] == n && lengths[CHAIN] == n;
    if (fits && f->sums)
        fits = lengths[DEPTH] == n && lengths[DEPTH_SUMS] == t;
    if (fits && f->chains) {
        fits = lengths[CHAIN_OF] == t && lengths[RELAYED] == t && lengths[NUM_NEXT] == t;
        for (Py_ssize_t i = 0; fits && i < t; i++)
            fits = (f->chain_of[i] + 1) * n <= lengths[BLOCKERS];
    }
    return fits;
}

/* Takes memory for what is kept on the way; 0 if there was enough. */
static int
allocate(Frontier *f)
{
    f->next = malloc((f->num_nodes + 1) * sizeof(int32_t));
    f->stack = malloc((f->num_nodes + 1) * sizeof(int32_t));
    f->ready = malloc(f->num_types * sizeof(int32_t));
    f->codes = malloc(f->num_types * sizeof(int64_t));
    f->types = calloc(f->num_types, sizeof(Type));
    f->waiting = calloc(f->num_nodes + 1, sizeof(int32_t));
    f->turns = f->looks ? calloc(f->num_nodes + 1, 1) : NULL;
    f->first_row = malloc(f->num_types * sizeof(int64_t));
    f->last_row = calloc(f->num_types, sizeof(int64_t));
    if (!f->next || !f->stack || !f->ready || !f->codes || !f->types || !f->waiting ||
        (f->looks && !f->turns) || !f->first_row || !f->last_row) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t t = 0; t < f->num_types; t++) {
        f->types[t].first = f->types[t].tallest = -1;
        f->types[t].longest = -1;
    }
    return 0;
}

static void
release_memory(Frontier *f)
{
    free(f->next);
    free(f->stack);
    free(f->ready);
    free(f->codes);
    free(f->types);
    free(f->waiting);
    free(f->turns);
    free(f->first_row);
    free(f->last_row);
    free(f->left_in_row);
}

/* schedule(num_types, heuristic, encoding, table, arrays): (types of batches, batches left to the
 * heuristic). `arrays` has None for those that nobody needs; `table` is None without a machine. */
PyObject *
schedule(PyObject *module, PyObject *args)
{
    (void)module;
    Policy policy;
    PyObject *given, *result = NULL, *batch_types;
    Py_ssize_t num_types;
    if (!PyArg_ParseTuple(args, "niiOO!", &num_types, &policy.heuristic, &policy.encoding,
                          &policy.table, &PyTuple_Type, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[NUM_ARRAYS];
    Py_ssize_t lengths[NUM_ARRAYS];
    if (get_buffers(&buffers, given, NUM_ARRAYS, item_sizes, data, lengths) < 0)
        return NULL;
    policy.numbers = data[NUMBERS];
    Frontier f = {
        .num_nodes = lengths[NODE_TYPE], .num_edges = lengths[SUCC], .num_types = num_types,
        .succ_ptr = data[SUCC_PTR], .succ = data[SUCC], .node_type = data[NODE_TYPE],
        .depth = data[DEPTH], .height = data[HEIGHTS], .chain = data[CHAIN],
        .depth_sums = data[DEPTH_SUMS], .chain_of = data[CHAIN_OF], .relayed = data[RELAYED],
        .blockers = data[BLOCKERS], .num_next = data[NUM_NEXT], .weight = data[WEIGHT],
        .when = data[WHEN], .looks = data[HEIGHTS] != NULL, .sums = data[DEPTH] != NULL,
        .chains = data[CHAIN_OF] != NULL,
    };
    int has_table = policy.table != Py_None;
    int has_all = (f.looks || (policy.heuristic != HEIGHT && policy.heuristic != CRITICAL &&
                               !(has_table && policy.encoding == PHASE))) &&
                  (f.sums || policy.heuristic != AGENDA) &&
                  (f.chains || policy.heuristic != SUFFICIENT) &&
                  (!has_table || (PyDict_Check(policy.table) && lengths[NUMBERS] == num_types));
    if (!has_all || !fit(&f, lengths)) {
        do_not_fit();
    } else if (allocate(&f) == 0 && prepare(&f) == 0 && (batch_types = PyList_New(0)) != NULL) {
        Py_ssize_t unseen = run_all(&f, &policy, batch_types);
        if (unseen >= 0)
            result = Py_BuildValue("(On)", batch_types, unseen);
        Py_DECREF(batch_types);
    }
    release_memory(&f);
    release_buffers(&buffers);
    return result;
}
