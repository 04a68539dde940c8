/* Graphs joined, and their edges: the twin of `_graph/joining.py` and of `find_edges` in
 * `_graph/analysis.py`, which say what is computed. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { MAX_COLUMNS = 4, NUM_PLACES = 11 };

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
