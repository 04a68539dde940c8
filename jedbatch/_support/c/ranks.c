/* Schedules by rank: the twin of `by_rank` in `_schedule/components.py` for types that read each
 * other in no circle, and of what it asks `_graph/analysis.py`. */

#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum {
    NODE_TYPE, NUM_RESULTS, OPERAND_PTR, OPERAND, EDGE_PTR, MAKER, READER, RANK, BATCH, BATCH_PTR,
    BATCH_NODE, BATCH_TYPE, IN_CHAINS, READS, REACHES, NUM
};

/* What is found on the way: of each node whether one reader or maker of its type is known, or more;
 * the types in order, and of each its nodes, its batches and the first of them, its edges and those
 * in chains. */
typedef struct {
    uint8_t *known;
    int64_t *order, *counts, *longest, *first, *edges, *links;
} Found;

static int
take_memory(Found *found, Py_ssize_t num_types, Py_ssize_t num_nodes)
{
    memset(found, 0, sizeof(Found));
    found->known = calloc(2 * num_nodes + 1, 1);
    found->order = calloc(6 * num_types + 1, sizeof(int64_t));
    if (found->known == NULL || found->order == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    found->counts = found->order + num_types;
    found->longest = found->counts + num_types;
    found->first = found->longest + num_types;
    found->edges = found->first + num_types;
    found->links = found->edges + num_types;
    return 0;
}

static void
give_memory(Found *found)
{
    free(found->known);
    free(found->order);
}

/* Puts the types that have nodes in an order in which they can run, those with fewest before them
 * first; -1 if two of them read each other. */
static Py_ssize_t
order_types(Found *found, uint8_t *reaches, Py_ssize_t num_types)
{
    for (Py_ssize_t via = 0; via < num_types; via++)
        for (Py_ssize_t t = 0; t < num_types; t++)
            if (reaches[t * num_types + via] && t != via)
                for (Py_ssize_t u = 0; u < num_types; u++)
                    reaches[t * num_types + u] |= reaches[via * num_types + u];
    int64_t *before = found->first; /* written later */
    Py_ssize_t count = 0;
    for (Py_ssize_t t = 0; t < num_types; t++)
        for (Py_ssize_t u = 0; u < num_types; u++) {
            if (t == u || !reaches[t * num_types + u])
                continue;
            if (reaches[u * num_types + t])
                return -1;
            before[u]++;
        }
    for (Py_ssize_t t = 0; t < num_types; t++) {
        if (found->counts[t] == 0)
            continue;
        Py_ssize_t k = count++;
        for (; k > 0 && before[found->order[k - 1]] > before[t]; k--)
            found->order[k] = found->order[k - 1];
        found->order[k] = t;
    }
    return count;
}

/* Makes the ranks 0 of nodes whose types read other types in a circle. */
static void
keep_ranks_alone(Found *found, const uint8_t *reaches, Py_ssize_t num_types,
                 const int32_t *node_type, Py_ssize_t num_nodes, int32_t *rank)
{
    int64_t *is_alone = found->order; /* not needed any more */
    for (Py_ssize_t t = 0; t < num_types; t++) {
        is_alone[t] = 1;
        for (Py_ssize_t u = 0; u < num_types; u++)
            if (t != u && reaches[t * num_types + u] && reaches[u * num_types + t])
                is_alone[t] = 0;
    }
    for (Py_ssize_t i = 0; i < num_nodes; i++)
        rank[i] = is_alone[node_type[i]] ? rank[i] : 0;
}

/* rank_batches(share, (type of nodes, results of types, operand_ptr, operands, edge_ptr, makers,
 * readers, rank, batch of nodes, batch_ptr, nodes of batches, type of batches, in chains, reads,
 * reaches)): writes edges as `find_edges` does, and relations of types as `type_relations`; for
 * each type whether at least a `share` of its edges are in chains, as `chain_types` counts them; the
 * rank of each node, and a batch for every rank of every type. Returns the numbers of edges and of
 * batches; -1 for the second if types read each other, and then there are no batches, and ranks
 * of types that read no other one in a circle only. */
PyObject *
rank_batches(PyObject *module, PyObject *args)
{
    (void)module;
    static const int sizes[NUM] = {4, 4, 8, 4, -8, -4, -4, -4, -4, -8, -4, -4, -1, -1, -1};
    PyObject *given;
    double share;
    if (!PyArg_ParseTuple(args, "dO", &share, &given))
        return NULL;
    Buffers buffers = {0};
    void *data[NUM];
    Py_ssize_t lengths[NUM];
    if (get_buffers(&buffers, given, NUM, sizes, data, lengths) < 0)
        return NULL;
    const int32_t *node_type = data[NODE_TYPE];
    const int32_t *maker = data[MAKER], *reader = data[READER];
    int32_t *rank = data[RANK], *batch = data[BATCH], *batch_node = data[BATCH_NODE];
    int32_t *batch_type = data[BATCH_TYPE];
    int64_t *batch_ptr = data[BATCH_PTR];
    uint8_t *in_chains = data[IN_CHAINS], *reads = data[READS];
    Py_ssize_t num_nodes = lengths[NODE_TYPE], num_types = lengths[NUM_RESULTS];
    Py_ssize_t num_batches = -1, num_alone = -1;
    Found found;
    memset(&found, 0, sizeof found);
    int fits = lengths[RANK] == num_nodes && lengths[BATCH] == num_nodes &&
               lengths[BATCH_PTR] == num_nodes + 1 && lengths[BATCH_NODE] == num_nodes &&
               lengths[BATCH_TYPE] == num_nodes && lengths[IN_CHAINS] == num_types &&
               num_types < INT32_MAX && lengths[READS] == num_types * num_types &&
               lengths[REACHES] == lengths[READS];
    Py_ssize_t num_edges = fits ? write_edges(data, lengths) : -1;
    fits = num_edges >= 0;
    if (fits && take_memory(&found, num_types, num_nodes) == 0) {
        uint8_t *num_readers = found.known, *num_makers = found.known + num_nodes;
        memset(reads, 0, lengths[READS]);
        for (Py_ssize_t i = 0; i < num_nodes; i++)
            found.counts[node_type[i]]++;
        memset(rank, 0, num_nodes * sizeof(int32_t));
        for (Py_ssize_t e = 0; fits && e < num_edges; e++) {
            int32_t a = maker[e], b = reader[e], from = node_type[a], to = node_type[b];
            fits = a < b;
            reads[from * num_types + to] = 1;
            if (from == to) {
                num_readers[a] += num_readers[a] < 2;
                num_makers[b] += num_makers[b] < 2;
                rank[b] = rank[a] >= rank[b] ? rank[a] + 1 : rank[b];
            }
        }
        for (Py_ssize_t e = 0; fits && e < num_edges; e++) {
            int32_t t = node_type[maker[e]];
            if (t == node_type[reader[e]]) {
                found.edges[t]++;
                found.links[t] += num_readers[maker[e]] == 1 && num_makers[reader[e]] == 1;
            }
        }
        for (Py_ssize_t t = 0; t < num_types; t++)
            in_chains[t] = found.edges[t] > 0 && found.links[t] >= share * found.edges[t];
        memcpy(data[REACHES], reads, lengths[READS]);
        num_alone = fits ? order_types(&found, data[REACHES], num_types) : -1;
        if (fits && num_alone < 0)
            keep_ranks_alone(&found, data[REACHES], num_types, node_type, num_nodes, rank);
    }
    if (num_alone >= 0) {
        for (Py_ssize_t i = 0; i < num_nodes; i++) {
            int64_t *longest = found.longest + node_type[i];
            *longest = rank[i] + 1 > *longest ? rank[i] + 1 : *longest;
        }
        num_batches = 0;
        for (Py_ssize_t k = 0; k < num_alone; k++) {
            int64_t t = found.order[k];
            found.first[t] = num_batches;
            for (int64_t r = 0; r < found.longest[t]; r++)
                batch_type[num_batches++] = (int32_t)t;
        }
        memset(batch_ptr, 0, (num_batches + 1) * sizeof(int64_t));
        for (Py_ssize_t i = 0; i < num_nodes; i++) {
            batch[i] = (int32_t)(found.first[node_type[i]] + rank[i]);
            batch_ptr[batch[i] + 1]++;
        }
        for (Py_ssize_t s = 0; s < num_batches; s++)
            batch_ptr[s + 1] += batch_ptr[s];
        for (Py_ssize_t i = 0; i < num_nodes; i++) /* moves each batch's beginning to its end */
            batch_node[batch_ptr[batch[i]]++] = (int32_t)i;
        memmove(batch_ptr + 1, batch_ptr, num_batches * sizeof(int64_t));
        batch_ptr[0] = 0;
    }
    give_memory(&found);
    release_buffers(&buffers);
    if (!fits && !PyErr_Occurred())
        do_not_fit();
    return PyErr_Occurred() ? NULL : Py_BuildValue("(nn)", num_edges, num_batches);
}
