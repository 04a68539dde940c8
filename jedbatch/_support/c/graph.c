/* Graphs joined, and what edges and types say of them: the twin of `_graph/joining.py` and
 * `_graph/analysis.py`, which say what is computed.
 *
 * Edges are given as in `_graph/paths.py`: by reader, makers before their readers.
 */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { MAX_COLUMNS = 4, NUM_PLACES = 11 };

static PyObject *
do_not_fit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays of a graph do not fit each other");
    return NULL;
}

/* --- graphs joined --- */

/* The share of an instance: where its rows begin in its graph and in the union. */
typedef struct {
    int64_t from[5], to[5]; /* nodes, operands, inputs, outputs, results */
    int64_t at[5];
} Share;

enum { NODES, OPERANDS, INPUTS, OUTPUTS, RESULTS };

static void
move_references(const Share *share, const int32_t *from, int32_t *to, int64_t count)
{
    int32_t up = (int32_t)(share->at[RESULTS] - share->from[RESULTS]);
    int32_t down = (int32_t)(share->at[INPUTS] - share->from[INPUTS]);
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i] + (from[i] >= 0 ? up : -down);
}

static void
move_share(const Share *share, void *const *from, void *const *to, int num_columns)
{
    int64_t num_nodes = share->to[NODES] - share->from[NODES];
    int64_t num_operands = share->to[OPERANDS] - share->from[OPERANDS];
    int64_t num_outputs = share->to[OUTPUTS] - share->from[OUTPUTS];
    int64_t shift = share->at[OPERANDS] - share->from[OPERANDS];
    const int64_t *ptr = (const int64_t *)from[1] + share->from[NODES] + 1;
    int64_t *new_ptr = (int64_t *)to[1] + share->at[NODES] + 1;
    memcpy((int32_t *)to[0] + share->at[NODES], (const int32_t *)from[0] + share->from[NODES],
           num_nodes * sizeof(int32_t));
    for (int64_t i = 0; i < num_nodes; i++)
        new_ptr[i] = ptr[i] + shift;
    move_references(share, (const int32_t *)from[2] + share->from[OPERANDS],
                    (int32_t *)to[2] + share->at[OPERANDS], num_operands);
    move_references(share, (const int32_t *)from[3] + share->from[OUTPUTS],
                    (int32_t *)to[3] + share->at[OUTPUTS], num_outputs);
    for (int i = 4; i < 4 + num_columns; i++)
        memcpy((int32_t *)to[i] + share->at[NODES], (const int32_t *)from[i] + share->from[NODES],
               num_nodes * sizeof(int32_t));
}

/* Reads the shares from rows of bounds, and finds their places; the ends of all in `end`. */
static Share *
find_shares(const int64_t *bounds, Py_ssize_t count, int64_t *end)
{
    Share *shares = malloc((count + 1) * sizeof(Share));
    if (shares == NULL)
        return (Share *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++)
        for (int k = 0; k < 5; k++) {
            const int64_t *bound = bounds + i * NUM_PLACES + 2 * k;
            shares[i].from[k] = bound[0];
            shares[i].to[k] = bound[1];
            shares[i].at[k] = end[k];
            if (bound[0] < 0 || bound[1] < bound[0]) {
                free(shares);
                return (Share *)do_not_fit();
            }
            end[k] += bound[1] - bound[0];
        }
    return shares;
}

/* join(graphs, (bounds, type of nodes, operand_ptr, operands, outputs, ...)): writes the union of
 * instances. Each graph is a tuple of the same columns; `bounds` has a row for each instance. */
PyObject *
join(PyObject *module, PyObject *args)
{
    (void)module;
    static const int from_sizes[4 + MAX_COLUMNS] = {4, 8, 4, 4, 4, 4, 4, 4};
    static const int to_sizes[5 + MAX_COLUMNS] = {8, -4, -8, -4, -4, -4, -4, -4, -4};
    PyObject *graphs, *given;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &graphs, &PyTuple_Type, &given))
        return NULL;
    int num_columns = (int)PyTuple_Size(given) - 5;
    if (num_columns < 0 || num_columns > MAX_COLUMNS)
        return do_not_fit();
    Buffers buffers = {0};
    void *to[5 + MAX_COLUMNS], *from[4 + MAX_COLUMNS];
    Py_ssize_t room[5 + MAX_COLUMNS], lengths[4 + MAX_COLUMNS];
    if (get_buffers(&buffers, given, 5 + num_columns, to_sizes, to, room) < 0)
        return NULL;
    const int64_t *bounds = to[0];
    Py_ssize_t count = room[0] / NUM_PLACES;
    int64_t end[5] = {0};
    Share *shares = find_shares(bounds, count, end);
    int fits = shares != NULL && room[1] == end[NODES] && room[2] == end[NODES] + 1 &&
               room[3] == end[OPERANDS] && room[4] == end[OUTPUTS];
    for (int i = 5; i < 5 + num_columns; i++)
        fits = fits && room[i] == end[NODES];
    if (fits)
        ((int64_t *)to[2])[0] = 0;
    for (Py_ssize_t g = 0; fits && g < PyList_Size(graphs); g++) {
        Buffers own = {0};
        PyObject *graph = PyList_GetItem(graphs, g);
        if (get_buffers(&own, graph, 4 + num_columns, from_sizes, from, lengths) < 0)
            break;
        for (Py_ssize_t i = 0; fits && i < count; i++) {
            if (bounds[i * NUM_PLACES + NUM_PLACES - 1] != g)
                continue;
            const int64_t *last = shares[i].to;
            fits = last[NODES] <= lengths[0] && last[NODES] < lengths[1] &&
                   last[OPERANDS] <= lengths[2] && last[OUTPUTS] <= lengths[3];
            for (int k = 4; fits && k < 4 + num_columns; k++)
                fits = last[NODES] <= lengths[k];
            if (fits)
                move_share(&shares[i], from, to + 1, num_columns);
        }
        release_buffers(&own);
    }
    free(shares);
    release_buffers(&buffers);
    if (!fits && !PyErr_Occurred())
        do_not_fit();
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* --- nodes --- */

/* count_nodes((type of nodes, results of types, value_ptr, nodes of types)): writes where the
 * results of each node begin, and how many nodes each type has. */
PyObject *
count_nodes(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[4] = {4, 4, -8, -8};
    Buffers buffers = {0};
    void *data[4];
    Py_ssize_t lengths[4];
    if (get_buffers(&buffers, given, 4, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node_type = data[0], *num_results = data[1];
    int64_t *value_ptr = data[2], *counts = data[3], value = 0;
    Py_ssize_t num_nodes = lengths[0];
    int fits = lengths[2] == num_nodes + 1 && lengths[3] == lengths[1] &&
               are_below(node_type, num_nodes, lengths[1]);
    if (fits) {
        memset(counts, 0, lengths[3] * sizeof(int64_t));
        for (Py_ssize_t i = 0; i < num_nodes; i++) {
            counts[node_type[i]]++;
            value_ptr[i] = value;
            value += num_results[node_type[i]];
        }
        value_ptr[num_nodes] = value;
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* largest_by((key, numbers, largest)): raises each of `largest` to the largest number of its key. */
PyObject *
largest_by(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[3] = {4, 4, -8};
    Buffers buffers = {0};
    void *data[3];
    Py_ssize_t lengths[3];
    if (get_buffers(&buffers, given, 3, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *key = data[0], *number = data[1];
    int64_t *largest = data[2];
    int fits = lengths[0] == lengths[1] && are_below(key, lengths[0], lengths[2]);
    for (Py_ssize_t i = 0; fits && i < lengths[0]; i++)
        if (number[i] > largest[key[i]])
            largest[key[i]] = number[i];
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* write_ranges((starts, counts, index)): writes the ranges one after the other; `counts` add up to as many
 * as there is room for. */
PyObject *
write_ranges(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[3] = {8, 8, -8};
    Buffers buffers = {0};
    void *data[3];
    Py_ssize_t lengths[3];
    if (get_buffers(&buffers, given, 3, sizes, data, lengths) < 0)
        return NULL;
    const int64_t *start = data[0], *count = data[1];
    int64_t *index = data[2], at = 0;
    int fits = lengths[0] == lengths[1];
    for (Py_ssize_t i = 0; fits && i < lengths[0]; i++) {
        fits = count[i] >= 0 && count[i] <= lengths[2] - at;
        for (int64_t k = 0; fits && k < count[i]; k++)
            index[at++] = start[i] + k;
    }
    fits = fits && at == lengths[2];
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* mark_inputs((references, used)): notes the inputs that are named, as -1 - i. */
PyObject *
mark_inputs(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[2] = {8, -1};
    Buffers buffers = {0};
    void *data[2];
    Py_ssize_t lengths[2];
    if (get_buffers(&buffers, given, 2, sizes, data, lengths) < 0)
        return NULL;
    const int64_t *reference = data[0];
    uint8_t *used = data[1];
    int fits = 1;
    for (Py_ssize_t i = 0; fits && i < lengths[0]; i++) {
        if (reference[i] >= 0)
            continue;
        fits = -1 - reference[i] < lengths[1];
        if (fits)
            used[-1 - reference[i]] = 1;
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* renumber_inputs((references, place)): makes references to inputs name their places. */
PyObject *
renumber_inputs(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[2] = {-8, 8};
    Buffers buffers = {0};
    void *data[2];
    Py_ssize_t lengths[2];
    if (get_buffers(&buffers, given, 2, sizes, data, lengths) < 0)
        return NULL;
    int64_t *reference = data[0];
    const int64_t *place = data[1];
    int fits = 1;
    for (Py_ssize_t i = 0; fits && i < lengths[0]; i++) {
        if (reference[i] >= 0)
            continue;
        fits = -1 - reference[i] < lengths[1];
        if (fits)
            reference[i] = -1 - place[-1 - reference[i]];
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* --- edges --- */

Py_ssize_t
write_edges(void *const *data, const Py_ssize_t *lengths)
{
    const int32_t *node_type = data[0], *num_results = data[1], *operand = data[3];
    const int64_t *operand_ptr = data[2];
    int64_t *ptr = data[4];
    int32_t *maker = data[5], *reader = data[6], *node_of = NULL;
    Py_ssize_t num_nodes = lengths[0], num_edges = 0;
    int64_t num_values = 0;
    int fits = lengths[2] == num_nodes + 1 && lengths[4] == num_nodes + 1 &&
               lengths[5] == lengths[3] && lengths[6] == lengths[3] &&
               are_pointers(operand_ptr, num_nodes + 1, lengths[3]) &&
               are_below(node_type, num_nodes, lengths[1]);
    for (Py_ssize_t t = 0; fits && t < lengths[1]; t++)
        fits = num_results[t] >= 0;
    for (Py_ssize_t i = 0; fits && i < num_nodes; i++)
        num_values += num_results[node_type[i]];
    if (fits && (node_of = malloc((num_values + 1) * sizeof(int32_t))) == NULL)
        PyErr_NoMemory();
    if (node_of != NULL) {
        int64_t value = 0;
        for (Py_ssize_t i = 0; i < num_nodes; i++)
            for (int32_t k = 0; k < num_results[node_type[i]]; k++)
                node_of[value++] = (int32_t)i;
        ptr[0] = 0;
        for (Py_ssize_t i = 0; fits && i < num_nodes; i++) {
            int32_t last = -1;
            for (int64_t k = operand_ptr[i]; k < operand_ptr[i + 1]; k++) {
                if (operand[k] < 0)
                    continue;
                if (operand[k] >= num_values) {
                    fits = 0;
                    break;
                }
                int32_t made_by = node_of[operand[k]];
                if (made_by != last) {
                    maker[num_edges] = last = made_by;
                    reader[num_edges++] = (int32_t)i;
                }
            }
            ptr[i + 1] = num_edges;
        }
    }
    fits = fits && node_of != NULL;
    free(node_of);
    return fits ? num_edges : -1;
}

/* find_edges((type of nodes, results of types, operand_ptr, operands, ptr, makers, readers)):
 * writes the edges between nodes, once for neighbours that are equal, and returns how many. */
PyObject *
find_edges(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[7] = {4, 4, 8, 4, -8, -4, -4};
    Buffers buffers = {0};
    void *data[7];
    Py_ssize_t lengths[7];
    if (get_buffers(&buffers, given, 7, sizes, data, lengths) < 0)
        return NULL;
    Py_ssize_t num_edges = write_edges(data, lengths);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return num_edges >= 0 ? PyLong_FromSsize_t(num_edges) : do_not_fit();
}

/* sort_by((key, ptr, places)): writes where the rows of each key begin, and the places of those
 * with it, ascending. Every key is in range. */
PyObject *
sort_by(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[3] = {4, -8, -4};
    Buffers buffers = {0};
    void *data[3];
    Py_ssize_t lengths[3];
    if (get_buffers(&buffers, given, 3, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *key = data[0];
    int64_t *ptr = data[1];
    int32_t *place = data[2];
    Py_ssize_t count = lengths[0], num_keys = lengths[1] - 1;
    int fits = num_keys >= 0 && lengths[2] == count && are_below(key, count, num_keys);
    if (fits) {
        memset(ptr, 0, (num_keys + 1) * sizeof(int64_t));
        for (Py_ssize_t i = 0; i < count; i++)
            ptr[key[i] + 1]++;
        for (Py_ssize_t k = 0; k < num_keys; k++)
            ptr[k + 1] += ptr[k];
        for (Py_ssize_t i = 0; i < count; i++) /* moves each row's beginning to its end */
            place[ptr[key[i]]++] = (int32_t)i;
        memmove(ptr + 1, ptr, num_keys * sizeof(int64_t));
        ptr[0] = 0;
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* --- types --- */

/* The nodes of a graph, its edges, and something for each type. */
typedef struct {
    const int32_t *node_type, *maker, *reader;
    Py_ssize_t num_nodes, num_edges, num_types;
} Typed;

/* Takes the first three arrays; 0 if types and edges are in range. */
static int
take_typed(Typed *x, void *const *data, const Py_ssize_t *lengths, Py_ssize_t num_types)
{
    x->node_type = data[0];
    x->maker = data[1];
    x->reader = data[2];
    x->num_nodes = lengths[0];
    x->num_edges = lengths[1];
    x->num_types = num_types;
    int fits = lengths[2] == lengths[1] && are_below(x->node_type, x->num_nodes, num_types) &&
               are_below(x->maker, x->num_edges, x->num_nodes) &&
               are_below(x->reader, x->num_edges, x->num_nodes);
    return fits ? 0 : -1;
}

/* relate_types((type of nodes, makers, readers, reads, reaches)): writes to bool[T, T] whether a
 * type is read by another one, and whether a path leads from it to another one. */
PyObject *
relate_types(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[5] = {4, 4, 4, -1, -1};
    Buffers buffers = {0};
    void *data[5];
    Py_ssize_t lengths[5], num_types = 0;
    if (get_buffers(&buffers, given, 5, sizes, data, lengths) < 0)
        return NULL;
    while (num_types * num_types < lengths[3])
        num_types++;
    uint8_t *reads = data[3], *reaches = data[4];
    Typed x;
    int fits = num_types * num_types == lengths[3] && lengths[4] == lengths[3] &&
               take_typed(&x, data, lengths, num_types) == 0;
    if (fits) {
        memset(reads, 0, lengths[3]);
        for (Py_ssize_t e = 0; e < x.num_edges; e++)
            reads[x.node_type[x.maker[e]] * num_types + x.node_type[x.reader[e]]] = 1;
        memcpy(reaches, reads, lengths[3]);
        for (Py_ssize_t via = 0; via < num_types; via++)
            for (Py_ssize_t t = 0; t < num_types; t++)
                if (reaches[t * num_types + via] && t != via)
                    for (Py_ssize_t u = 0; u < num_types; u++)
                        reaches[t * num_types + u] |= reaches[via * num_types + u];
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* find_chained((type of nodes, makers, readers, edges, links)): writes for each type its edges
 * inside of it, and how many of them are in chains. */
PyObject *
find_chained(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[5] = {4, 4, 4, -8, -8};
    Buffers buffers = {0};
    void *data[5];
    Py_ssize_t lengths[5];
    if (get_buffers(&buffers, given, 5, sizes, data, lengths) < 0)
        return NULL;
    int64_t *edges = data[3], *links = data[4];
    uint8_t *counts = NULL;
    Typed x;
    int fits = lengths[4] == lengths[3] && take_typed(&x, data, lengths, lengths[3]) == 0;
    if (fits && (counts = calloc(2 * x.num_nodes + 1, 1)) == NULL)
        PyErr_NoMemory();
    if (counts != NULL) { /* of readers and makers of the same type: none, one or two and more */
        uint8_t *num_readers = counts, *num_makers = counts + x.num_nodes;
        memset(edges, 0, lengths[3] * sizeof(int64_t));
        memset(links, 0, lengths[3] * sizeof(int64_t));
        for (Py_ssize_t e = 0; e < x.num_edges; e++) {
            int32_t maker = x.maker[e], reader = x.reader[e];
            if (x.node_type[maker] == x.node_type[reader]) {
                num_readers[maker] += num_readers[maker] < 2;
                num_makers[reader] += num_makers[reader] < 2;
            }
        }
        for (Py_ssize_t e = 0; e < x.num_edges; e++) {
            int32_t maker = x.maker[e], reader = x.reader[e], t = x.node_type[maker];
            if (t == x.node_type[reader]) {
                edges[t]++;
                links[t] += num_readers[maker] == 1 && num_makers[reader] == 1;
            }
        }
    }
    free(counts);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* find_turns((type of nodes, makers, readers, heights, turns)): writes to bool[N] whether a longest
 * path goes on from a node to one of another type. */
PyObject *
find_turns(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[5] = {4, 4, 4, 4, -1};
    Buffers buffers = {0};
    void *data[5];
    Py_ssize_t lengths[5];
    if (get_buffers(&buffers, given, 5, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *height = data[3];
    uint8_t *turns = data[4];
    Typed x;
    int fits = lengths[3] == lengths[0] && lengths[4] == lengths[0] &&
               take_typed(&x, data, lengths, INT32_MAX) == 0;
    if (fits) {
        memset(turns, 0, x.num_nodes);
        for (Py_ssize_t e = 0; e < x.num_edges; e++) {
            int32_t maker = x.maker[e], reader = x.reader[e];
            if (height[maker] == height[reader] + 1 && x.node_type[maker] != x.node_type[reader])
                turns[maker] = 1;
        }
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* longest_ahead((makers, readers, length)): adds to `length` the edges of longest paths that begin
 * in each node. */
PyObject *
longest_ahead(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[3] = {4, 4, -4};
    Buffers buffers = {0};
    void *data[3];
    Py_ssize_t lengths[3];
    if (get_buffers(&buffers, given, 3, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *maker = data[0], *reader = data[1];
    int32_t *length = data[2];
    int fits = lengths[0] == lengths[1] && are_below(maker, lengths[0], lengths[2]) &&
               are_below(reader, lengths[1], lengths[2]);
    for (Py_ssize_t e = lengths[0] - 1; fits && e >= 0; e--)
        if (length[maker[e]] <= length[reader[e]])
            length[maker[e]] = length[reader[e]] + 1;
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

enum { FEW_TYPES = 8 }; /* of which 16-bit lengths fill a register */

/* Does the same as `follow_chains` for up to `FEW_TYPES` types, and fewer nodes than 16 bits count. */
static int
follow_few_chains(const Typed *x, const int32_t *places, int is_ahead, int32_t *longest)
{
    int16_t(*chains)[FEW_TYPES] = calloc(x->num_nodes + 1, sizeof *chains);
    if (chains == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < x->num_nodes; i++)
        if (places[x->node_type[i]] >= 0)
            chains[i][places[x->node_type[i]]] = 1;
    for (Py_ssize_t i = 0; i < x->num_edges; i++) {
        Py_ssize_t e = is_ahead ? x->num_edges - 1 - i : i;
        int32_t before = is_ahead ? x->reader[e] : x->maker[e];
        int32_t after = is_ahead ? x->maker[e] : x->reader[e], own = places[x->node_type[after]];
        if (own < 0 || places[x->node_type[before]] < 0)
            continue;
        const int16_t *restrict from = chains[before];
        int16_t *restrict to = chains[after], length = (int16_t)(from[own] + 1);
        for (int k = 0; k < FEW_TYPES; k++)
            to[k] = from[k] > to[k] ? from[k] : to[k];
        to[own] = length > to[own] ? length : to[own];
    }
    for (Py_ssize_t i = 0; i < x->num_nodes; i++)
        if (places[x->node_type[i]] >= 0)
            longest[i] = chains[i][places[x->node_type[i]]];
    free(chains);
    return 0;
}

/* Follows the chains of all types of a component at once: `places` says which of the component's
 * `count` types a type is, -1 elsewhere. Returns -1 without memory. */
static int
follow_chains(const Typed *x, const int32_t *places, Py_ssize_t count, int is_ahead,
              int32_t *longest)
{
    if (count <= FEW_TYPES && x->num_nodes < INT16_MAX)
        return follow_few_chains(x, places, is_ahead, longest);
    int32_t *index = malloc((x->num_nodes + 1) * sizeof(int32_t));
    Py_ssize_t num_inside = 0;
    for (Py_ssize_t i = 0; index != NULL && i < x->num_nodes; i++)
        index[i] = places[x->node_type[i]] >= 0 ? (int32_t)num_inside++ : -1;
    int32_t *chains = calloc(num_inside * count + 1, sizeof(int32_t));
    if (index == NULL || chains == NULL) {
        free(index);
        free(chains);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < x->num_nodes; i++)
        if (index[i] >= 0)
            chains[index[i] * count + places[x->node_type[i]]] = 1;
    for (Py_ssize_t i = 0; i < x->num_edges; i++) {
        Py_ssize_t e = is_ahead ? x->num_edges - 1 - i : i;
        int32_t before = is_ahead ? x->reader[e] : x->maker[e];
        int32_t after = is_ahead ? x->maker[e] : x->reader[e];
        if (index[before] < 0 || index[after] < 0)
            continue;
        const int32_t *from = chains + index[before] * count;
        int32_t *to = chains + index[after] * count, own = places[x->node_type[after]];
        for (Py_ssize_t k = 0; k < count; k++) {
            int32_t length = from[k] + (k == own);
            to[k] = length > to[k] ? length : to[k];
        }
    }
    for (Py_ssize_t i = 0; i < x->num_nodes; i++)
        if (index[i] >= 0)
            longest[i] = chains[index[i] * count + places[x->node_type[i]]];
    free(index);
    free(chains);
    return 0;
}

/* find_chains(is ahead, (type of nodes, makers, readers, component of types, longest)): writes the
 * nodes of its type on a longest chain that ends in each node, or begins there. Components are
 * numbered from 0; chains of types of component -1 are of single nodes. */
PyObject *
find_chains(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[5] = {4, 4, 4, 4, -4};
    PyObject *given;
    int is_ahead;
    if (!PyArg_ParseTuple(args, "iO", &is_ahead, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[5];
    Py_ssize_t lengths[5];
    if (get_buffers(&buffers, given, 5, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *component = data[3];
    int32_t *longest = data[4], *places = NULL;
    Typed x;
    int fits = lengths[4] == lengths[0] && take_typed(&x, data, lengths, lengths[3]) == 0;
    if (fits && (places = malloc((x.num_types + 1) * sizeof(int32_t))) == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; places != NULL && i < x.num_nodes; i++)
        longest[i] = 1;
    for (Py_ssize_t i = 0; places != NULL && i < x.num_edges; i++) { /* types that are alone */
        Py_ssize_t e = is_ahead ? x.num_edges - 1 - i : i;
        int32_t before = is_ahead ? x.reader[e] : x.maker[e];
        int32_t after = is_ahead ? x.maker[e] : x.reader[e], t = x.node_type[before];
        if (t == x.node_type[after] && component[t] >= 0 && longest[after] <= longest[before])
            longest[after] = longest[before] + 1;
    }
    for (Py_ssize_t t = 0; places != NULL && t < x.num_types; t++) {
        Py_ssize_t first = 0, count = 0;
        while (component[first] != component[t])
            first++;
        if (component[t] < 0 || first < t)
            continue;
        for (Py_ssize_t u = 0; u < x.num_types; u++)
            places[u] = component[u] == component[t] ? (int32_t)count++ : -1;
        if (count > 1 && follow_chains(&x, places, count, is_ahead, longest) < 0)
            break;
    }
    free(places);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* induce((type of nodes, makers, readers, place of types, nodes, inner makers, inner readers)):
 * writes the nodes of types that have a place, and the edges between them, numbered among them.
 * (How many nodes, how many edges.) */
PyObject *
induce(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[7] = {4, 4, 4, 4, -8, -4, -4};
    Buffers buffers = {0};
    void *data[7];
    Py_ssize_t lengths[7];
    if (get_buffers(&buffers, given, 7, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *place = data[3];
    int64_t *nodes = data[4];
    int32_t *maker = data[5], *reader = data[6], *index = NULL;
    Py_ssize_t num_inside = 0, num_edges = 0;
    Typed x;
    int fits = lengths[4] == lengths[0] && lengths[5] == lengths[1] && lengths[6] == lengths[1] &&
               take_typed(&x, data, lengths, lengths[3]) == 0;
    if (fits && (index = malloc((x.num_nodes + 1) * sizeof(int32_t))) == NULL)
        PyErr_NoMemory();
    if (index != NULL) {
        for (Py_ssize_t i = 0; i < x.num_nodes; i++) {
            index[i] = (int32_t)num_inside;
            nodes[num_inside] = i;
            num_inside += place[x.node_type[i]] >= 0;
        }
        for (Py_ssize_t e = 0; e < x.num_edges; e++) {
            int32_t a = x.maker[e], b = x.reader[e];
            maker[num_edges] = index[a];
            reader[num_edges] = index[b];
            num_edges += place[x.node_type[a]] >= 0 && place[x.node_type[b]] >= 0;
        }
    }
    free(index);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_BuildValue("(nn)", num_inside, num_edges) : do_not_fit();
}
