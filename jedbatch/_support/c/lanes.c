/* Orders and tables of a scheduled graph: the twin of parts of `_layout/node_order.py` and of
 * `_program/lower.py`, which say what is computed. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { NUM_WIDTHS = 5 };

/* --- orders --- */

/* sort_batches((node, node_ptr, is sorted, key)): sorts the nodes of some batches by their keys,
 * in place; those with equal keys stay as they are. Keys lie in a range not much wider than there
 * are nodes. */
PyObject *
sort_batches(PyObject *module, PyObject *given)
{
    (void)module;
    static const int sizes[4] = {-4, 8, 1, 4};
    Buffers buffers = {0};
    void *data[4];
    Py_ssize_t lengths[4];
    if (get_buffers(&buffers, given, 4, sizes, data, lengths) < 0)
        return NULL;
    int32_t *node = data[0], *sorted = NULL, *batch = NULL; /* the sorted nodes, their batches */
    const int64_t *node_ptr = data[1];
    const uint8_t *is_sorted = data[2];
    const int32_t *key = data[3];
    Py_ssize_t num_nodes = lengths[0], num_batches = lengths[2], num_moving = 0;
    int64_t least = INT32_MAX, most = INT32_MIN, *count = NULL;
    int fits = lengths[1] == num_batches + 1 && are_pointers(node_ptr, num_batches + 1, num_nodes) &&
               are_below(node, num_nodes, lengths[3]);
    for (Py_ssize_t b = 0; fits && b < num_batches; b++)
        for (int64_t i = node_ptr[b]; is_sorted[b] && i < node_ptr[b + 1]; i++) {
            int64_t k = key[node[i]];
            least = k < least ? k : least;
            most = k > most ? k : most;
            num_moving++;
        }
    int64_t range = num_moving > 0 ? most - least + 1 : 0;
    fits = fits && range <= 4 * (int64_t)lengths[3] + 64;
    if (fits) {
        sorted = malloc((num_moving + 1) * sizeof(int32_t));
        batch = malloc((num_moving + 1) * sizeof(int32_t));
        count = calloc((range > num_batches ? range : num_batches) + 2, sizeof(int64_t));
        if (sorted == NULL || batch == NULL || count == NULL)
            PyErr_NoMemory();
    }
    if (fits && !PyErr_Occurred()) { /* by key, and then, as they are, by batch */
        for (Py_ssize_t b = 0; b < num_batches; b++)
            for (int64_t i = node_ptr[b]; is_sorted[b] && i < node_ptr[b + 1]; i++)
                count[key[node[i]] - least + 1]++;
        for (int64_t k = 0; k < range; k++)
            count[k + 1] += count[k];
        for (Py_ssize_t b = 0; b < num_batches; b++)
            for (int64_t i = node_ptr[b]; is_sorted[b] && i < node_ptr[b + 1]; i++) {
                int64_t at = count[key[node[i]] - least]++;
                sorted[at] = node[i];
                batch[at] = (int32_t)b;
            }
        memcpy(count, node_ptr, num_batches * sizeof(int64_t));
        for (Py_ssize_t i = 0; i < num_moving; i++)
            node[count[batch[i]]++] = sorted[i];
    }
    free(sorted);
    free(batch);
    free(count);
    release_buffers(&buffers);
    if (PyErr_Occurred())
        return NULL;
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}

/* --- tables --- */

enum {
    NODE_TYPE, RESULTS_OF_TYPE, VALUE_PTR, OPERAND_PTR, OPERAND, LANE, TYPE_LANES, LANE_NODE,
    INPUT_ROW, BASE, RUNS, FORM, WIDTH_OF, ROW, OWN_RUNS, TABLE, NUM_OF_TABLE
};
enum { TYPE, PLACE, NUM_OPERANDS, OFFSET, ROOM, FORM_COLUMNS };

/* Writes the rows of the operands of one type, lane after lane; beyond the lanes, those of the
 * first. Returns whether all are there. */
static int
write_operands(const int64_t *form, const int32_t *lane_node, int64_t num_lanes,
               void *const *data, const Py_ssize_t *lengths)
{
    const int64_t *operand_ptr = data[OPERAND_PTR], *row = data[ROW];
    const int32_t *operand = data[OPERAND];
    int32_t *rows = (int32_t *)data[TABLE] + form[OFFSET];
    int64_t count = form[NUM_OPERANDS], room = form[ROOM], num_rows = lengths[ROW];
    int fits = count >= 0 && count <= INT32_MAX && room >= 0 && room <= INT32_MAX &&
               form[OFFSET] >= 0 && form[OFFSET] <= lengths[TABLE] && num_lanes <= room &&
               count * room <= lengths[TABLE] - form[OFFSET];
    for (int64_t i = 0; fits && i < num_lanes; i++) {
        int64_t first = operand_ptr[lane_node[i]];
        fits = first >= 0 && first + count <= lengths[OPERAND];
        for (int64_t k = 0; fits && k < count; k++) {
            int64_t at = operand[first + k];
            at += at < 0 ? num_rows : 0;
            fits = at >= 0 && at < num_rows;
            rows[k * room + i] = fits ? (int32_t)row[at] : 0;
        }
    }
    for (int64_t k = 0; fits && num_lanes > 0 && k < count; k++)
        for (int64_t i = num_lanes; i < room; i++)
            rows[k * room + i] = rows[k * room];
    return fits;
}

/* write_table(offset of instructions, (type of nodes, results of types, value_ptr, operand_ptr,
 * operands, lanes of nodes, lane_ptr, nodes of lanes, rows of inputs, rows at which results of types
 * begin, runs, form, width of opcodes, row, runs of the program, table)): writes instructions that
 * run in loops and rows of operands to a table, the row of every value and input, -1 - i for input
 * i, to `row`, and runs by the opcodes of the program. `form` has for each kernel its type, its
 * place in the program, its operands, where they begin in the table, and lanes there. */
PyObject *
write_table(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[NUM_OF_TABLE] = {4, 4, 8, 8, 4, 8, 8, 4, 8, 8, 8, 8, 8, -8, -8, -4};
    PyObject *given;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "nO", &offset, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[NUM_OF_TABLE];
    Py_ssize_t lengths[NUM_OF_TABLE];
    if (get_buffers(&buffers, given, NUM_OF_TABLE, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node_type = data[NODE_TYPE], *num_results = data[RESULTS_OF_TYPE];
    const int64_t *value_ptr = data[VALUE_PTR], *lane = data[LANE], *lane_ptr = data[TYPE_LANES];
    const int64_t *input_row = data[INPUT_ROW], *base = data[BASE], *runs = data[RUNS];
    const int64_t *form = data[FORM], *width_of = data[WIDTH_OF];
    const int32_t *lane_node = data[LANE_NODE];
    int64_t *row = data[ROW], *own_runs = data[OWN_RUNS];
    int32_t *table = data[TABLE];
    Py_ssize_t num_nodes = lengths[NODE_TYPE], num_types = lengths[RESULTS_OF_TYPE];
    Py_ssize_t most = num_types > 0 ? lengths[BASE] / num_types : 0, num_inputs = lengths[INPUT_ROW];
    Py_ssize_t num_kernels = lengths[FORM] / FORM_COLUMNS, num_runs = lengths[RUNS] / 3;
    int fits = are_below(node_type, num_nodes, num_types) && lengths[VALUE_PTR] == num_nodes + 1 &&
               lengths[OPERAND_PTR] == num_nodes + 1 && lengths[LANE] == num_nodes &&
               lengths[BASE] == most * num_types && lengths[TYPE_LANES] == num_types + 1 &&
               are_pointers(lane_ptr, num_types + 1, lengths[LANE_NODE]) &&
               are_below(lane_node, lengths[LANE_NODE], num_nodes) &&
               lengths[OWN_RUNS] == lengths[RUNS] && offset >= 0 &&
               offset + lengths[RUNS] <= lengths[TABLE] && value_ptr[0] == 0 &&
               value_ptr[num_nodes] >= 0 && lengths[ROW] == value_ptr[num_nodes] + num_inputs;
    for (Py_ssize_t i = 0; fits && i < num_nodes; i++) {
        int32_t t = node_type[i], count = num_results[t];
        fits = count >= 0 && count <= most && value_ptr[i] >= 0 &&
               value_ptr[i] + count <= value_ptr[num_nodes];
        for (int32_t s = 0; fits && s < count; s++)
            row[value_ptr[i] + s] = base[t * most + s] + lane[i];
    }
    for (Py_ssize_t i = 0; fits && i < num_inputs; i++)
        row[lengths[ROW] - 1 - i] = input_row[i];
    for (Py_ssize_t i = 0; fits && i < num_runs; i++) {
        int64_t k = runs[3 * i] >= 0 ? runs[3 * i] / NUM_WIDTHS : num_kernels;
        int64_t what = k < num_kernels ? form[k * FORM_COLUMNS + PLACE] * NUM_WIDTHS +
                                             runs[3 * i] % NUM_WIDTHS
                                       : -1;
        fits = what >= 0 && what < lengths[WIDTH_OF];
        if (!fits)
            break;
        own_runs[3 * i] = what;
        own_runs[3 * i + 1] = runs[3 * i + 1];
        own_runs[3 * i + 2] = runs[3 * i + 2];
        table[offset + 3 * i] = (int32_t)what;
        table[offset + 3 * i + 1] = (int32_t)runs[3 * i + 1];
        table[offset + 3 * i + 2] = (int32_t)(runs[3 * i + 1] + runs[3 * i + 2] * width_of[what]);
    }
    for (Py_ssize_t k = 0; fits && k < num_kernels; k++) {
        const int64_t *own = form + k * FORM_COLUMNS;
        fits = own[TYPE] >= 0 && own[TYPE] < num_types;
        if (fits)
            fits = write_operands(own, lane_node + lane_ptr[own[TYPE]],
                                  lane_ptr[own[TYPE] + 1] - lane_ptr[own[TYPE]], data, lengths);
    }
    release_buffers(&buffers);
    return fits ? Py_NewRef(Py_None) : do_not_fit();
}
