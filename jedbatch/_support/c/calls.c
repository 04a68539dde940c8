/* Functions that XLA:CPU calls in compiled programs: reading rows of arrays, writing rows of arrays
 * in place, making an array that is left as it is, and finding what comes back.
 */

#if defined(__linux__) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* for madvise */
#endif

#include "calls.h"
#include "core.h"

#include <string.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

enum { PAGE = 4096, LARGE = 4 << 20 }; /* bytes; an array of the latter has a huge page in it */

/* Copies the rows of some indices, those that follow one another at once; `step` bytes lie between
 * the places of two of them. */
static void
copy_rows(char *out, size_t step, const char *rows, size_t size, int64_t num_rows,
          const int32_t *index, int64_t count)
{
    for (int64_t i = 0; i < count;) {
        int64_t first = clamped(index[i], num_rows), length = 1;
        if (step == size)
            while (i + length < count && index[i + length] == first + length &&
                   first + length < num_rows)
                length++;
        memcpy(out + (size_t)i * step, rows + (size_t)first * size, (size_t)length * size);
        i += length;
    }
}

/* Copies the rows of some indices, zeros for those that are negative. */
static void
copy_existing(char *out, const char *rows, size_t size, int64_t num_rows, const int32_t *index,
              int64_t count)
{
    for (int64_t i = 0, end; i < count; i = end) {
        for (end = i; end < count && index[end] >= 0; end++)
            ;
        copy_rows(out + (size_t)i * size, size, rows, size, num_rows, index + i, end - i);
        for (; end < count && index[end] < 0; end++)
            memset(out + (size_t)end * size, 0, size);
    }
}

#define ADD_ROWS(name, type)                                                                      \
    static void name(type *restrict out, const type *rows, size_t items, int64_t num_rows,        \
                     const int32_t *index, int64_t count)                                         \
    {                                                                                             \
        for (int64_t i = 0; i < count; i++, out += items) {                                       \
            if (index[i] < 0)                                                                     \
                continue;                                                                         \
            const type *restrict row = rows + (size_t)clamped(index[i], num_rows) * items;        \
            for (size_t j = 0; j < items; j++)                                                    \
                out[j] += row[j];                                                                 \
        }                                                                                         \
    }

ADD_ROWS(add_rows_of_float32, float)
ADD_ROWS(add_rows_of_float64, double)

/* Reads rows: of (table, first lane, arrays...), one result for each five numbers
 *
 *     array, offset, stride, count, is_sum
 *
 * whose row of lane l has, for every k below the count, the row table[offset + k * stride + lane]
 * of the array: one after the other, or their sum, in which negative numbers stand for no row. */
static void *
take_rows(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer **given = frame->arguments.buffers, **results = frame->results.buffers;
    const int32_t *table = given[0]->data;
    int64_t table_size = given[0]->dims[0], lane = *(int32_t *)given[1]->data;
    const int64_t *read = frame->attributes.values[0]->data;
    for (int64_t r = 0; r < frame->results.size; r++, read += 5) {
        const Buffer *rows = given[2 + read[0]];
        int64_t count = read[3], width = results[r]->dims[0], num_rows = rows->dims[0];
        size_t size = row_size(rows);
        char *out = results[r]->data;
        for (int64_t k = 0; k < count; k++) {
            int64_t first = clamped(read[1] + k * read[2] + lane, table_size - width + 1);
            const int32_t *index = table + first;
            if (!read[4])
                copy_rows(out + size * (size_t)k, size * (size_t)count, rows->data, size, num_rows,
                          index, width);
            else if (k == 0)
                copy_existing(out, rows->data, size, num_rows, index, width);
            else if (rows->dtype == FLOAT32)
                add_rows_of_float32((float *)out, rows->data, size / 4, num_rows, index, width);
            else
                add_rows_of_float64((double *)out, rows->data, size / 8, num_rows, index, width);
        }
    }
    return NULL;
}

/* Writes rows into arrays: of (table, first lane, arrays..., rows...), the arrays, in place. For
 * each of the rows there are four numbers
 *
 *     array, base, stride, offset
 *
 * and the first is written to row base + stride * lane, or if there is an offset, which is not
 * negative, to row table[offset + lane]. */
static void *
put_rows(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer **given = frame->arguments.buffers, **results = frame->results.buffers;
    const int32_t *table = given[0]->data;
    int64_t table_size = given[0]->dims[0], lane = *(int32_t *)given[1]->data;
    int64_t num_arrays = frame->results.size;
    for (int64_t a = 0; a < num_arrays; a++) /* the same memory, as XLA was told */
        if (results[a]->data != given[2 + a]->data)
            memcpy(results[a]->data, given[2 + a]->data,
                   row_size(results[a]) * (size_t)results[a]->dims[0]);
    const int64_t *write = frame->attributes.values[0]->data;
    for (int64_t i = 2 + num_arrays; i < frame->arguments.size; i++, write += 4) {
        const Buffer *rows = given[i];
        Buffer *array = results[write[0]];
        size_t size = row_size(array);
        int64_t first = write[1] + write[2] * lane;
        if (write[3] >= 0)
            first = table[clamped(write[3] + lane, table_size)];
        first = clamped(first, array->dims[0] - rows->dims[0] + 1);
        memcpy((char *)array->data + (size_t)first * size, rows->data,
               size * (size_t)rows->dims[0]);
    }
    return NULL;
}

/* Which instances run together: of (table, place, and which may, if there is a third argument), with
 * the numbers
 *
 *     order, calls, is_first, limits, (limit...), (column...)
 *
 * their numbers table[order + place...], which of them exist, and numbers of theirs from columns of
 * the table, of which the first have limits. The numbers of one that does not exist are those of
 * the first, or else of the first that may. */
static void *
instances(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer **given = frame->arguments.buffers, **results = frame->results.buffers;
    const int32_t *table = given[0]->data;
    const char *may = frame->arguments.size > 2 ? given[2]->data : NULL;
    const int64_t *numbers = frame->attributes.values[0]->data;
    int64_t num_calls = numbers[1], num_limits = numbers[3], size = results[0]->dims[0];
    const int64_t *limits = numbers + 4, *columns = limits + num_limits;
    int64_t place = numbers[0] + *(int32_t *)given[1]->data;
    const int32_t *order = table + clamped(place, given[0]->dims[0] - size + 1);
    int32_t *calls = results[0]->data, stand_in = 0;
    char *alive = results[1]->data;
    if (may != NULL) {
        while (stand_in < num_calls && !may[stand_in])
            stand_in++;
        stand_in = stand_in < num_calls ? stand_in : 0;
    }
    else if (numbers[2] && size)
        stand_in = order[0];
    for (int64_t g = 0; g < size; g++) {
        alive[g] = order[g] < num_calls && (may == NULL || may[order[g]]);
        calls[g] = (int32_t)clamped(alive[g] ? order[g] : stand_in, num_calls);
    }
    for (int64_t c = 0; c < frame->results.size - 2; c++) {
        int32_t *out = results[2 + c]->data;
        for (int64_t g = 0; g < size; g++) {
            int32_t number = table[columns[c] + calls[g]];
            out[g] = c < num_limits && number > limits[c] ? (int32_t)limits[c] : number;
        }
    }
    return NULL;
}

/* Where the rows of instances are among packed rows: the arguments of a call from some on. */
typedef struct {
    const int32_t *starts, *counts;
    const char *alive;
    int64_t offset;
} Instances;

static Instances
instances_from(Buffer **given)
{
    Instances instances = {given[0]->data, given[1]->data, given[2]->data,
                           *(int32_t *)given[3]->data};
    return instances;
}

/* How many of the next `length` rows of an instance there are among so many packed rows. */
static int64_t
rows_there(const Instances *of, int64_t instance, int64_t length, int64_t num_rows)
{
    int64_t first = of->starts[instance] + of->offset, count = of->counts[instance] - of->offset;
    count = count < length ? count : length;
    count = count < num_rows - first ? count : num_rows - first;
    return count < 0 || first < 0 ? 0 : count;
}

/* Reads the rows of instances: of (packed rows, first rows, counts, which exist, first row of each
 * that is meant), so many for each as the result has. Rows beyond the last repeat it; if a flag is
 * set they are zeros, and so are those of instances that do not exist. */
static void *
read_instances(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    const Buffer *packed = frame->arguments.buffers[0], *result = frame->results.buffers[0];
    Instances of = instances_from(frame->arguments.buffers + 1);
    int zeros = *frame->attributes.values[0]->data != 0;
    int64_t length = result->dims[1], num_rows = packed->dims[0];
    size_t size = row_size(packed);
    const char *rows = packed->data;
    char *out = result->data;
    for (int64_t g = 0; g < result->dims[0]; g++, out += size * (size_t)length) {
        int64_t there = rows_there(&of, g, length, num_rows);
        if (zeros && !of.alive[g])
            there = 0;
        if (there)
            memcpy(out, rows + size * (size_t)(of.starts[g] + of.offset), size * (size_t)there);
        if (zeros) {
            memset(out + size * (size_t)there, 0, size * (size_t)(length - there));
            continue;
        }
        int64_t last = clamped((int64_t)of.starts[g] + of.counts[g] - 1, num_rows);
        for (int64_t i = there; i < length; i++)
            memcpy(out + size * (size_t)i, rows + size * (size_t)last, size);
    }
    return NULL;
}

#define ADD_ALL(name, type)                                                                       \
    static void name(type *restrict out, const type *restrict given, size_t items)                \
    {                                                                                             \
        for (size_t j = 0; j < items; j++)                                                        \
            out[j] += given[j];                                                                   \
    }

ADD_ALL(add_float32, float)
ADD_ALL(add_float64, double)

/* Writes the rows of instances in place: of (packed rows, rows of instances, and where they are as
 * in `read_instances`). They are added if a flag is set. */
static void *
write_instances(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer **given = frame->arguments.buffers, *result = frame->results.buffers[0];
    Instances of = instances_from(given + 2);
    int add = *frame->attributes.values[0]->data != 0;
    int64_t length = given[1]->dims[1], num_rows = result->dims[0];
    size_t size = row_size(result);
    char *packed = result->data;
    const char *rows = given[1]->data;
    if (packed != given[0]->data) /* the same memory, as XLA was told */
        memcpy(packed, given[0]->data, size * (size_t)num_rows);
    for (int64_t g = 0; g < given[1]->dims[0]; g++, rows += size * (size_t)length) {
        int64_t there = of.alive[g] ? rows_there(&of, g, length, num_rows) : 0;
        if (!there)
            continue;
        char *out = packed + size * (size_t)(of.starts[g] + of.offset);
        size_t bytes = size * (size_t)there;
        if (!add)
            memcpy(out, rows, bytes);
        else if (result->dtype == FLOAT32)
            add_float32((float *)out, (const float *)rows, bytes / 4);
        else
            add_float64((double *)out, (const double *)rows, bytes / 8);
    }
    return NULL;
}

/* Asks Linux to map the memory of a large array in huge pages, as far as it is not mapped yet.
 *
 * The memory of a program that takes more than 32 MB comes from the kernel anew at each run (see
 * malloc's M_MMAP_THRESHOLD), and to map it page by page can take half of the run.
 */
static void
ask_for_huge_pages(const Buffer *array)
{
#ifdef MADV_HUGEPAGE
    uintptr_t start = (uintptr_t)array->data, end = start;
    end += row_size(array) * (size_t)array->dims[0];
    start = (start + PAGE - 1) / PAGE * PAGE;
    end = end / PAGE * PAGE;
    if (end > start && end - start >= LARGE)
        madvise((void *)start, end - start, MADV_HUGEPAGE); /* an error changes nothing */
#else
    (void)array;
#endif
}

/* Leaves its result as it is. */
static void *
uninitialized(CallFrame *frame)
{
    if (!asks_for_metadata(frame))
        ask_for_huge_pages(frame->results.buffers[0]);
    return NULL;
}

/* Leaves as many rows of its result as its first argument says as they are; others are zeros. */
static void *
unfilled(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer *result = frame->results.buffers[0];
    int64_t num_rows = result->dims[0], first = *(int32_t *)frame->arguments.buffers[0]->data;
    first = first < 0 ? 0 : first < num_rows ? first : num_rows;
    size_t size = row_size(result);
    ask_for_huge_pages(result);
    memset((char *)result->data + size * (size_t)first, 0, size * (size_t)(num_rows - first));
    return NULL;
}

/* xla_calls(): (name, function as `jax.ffi.register_ffi_target` takes it) for each of them. */
PyObject *
xla_calls(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    static const struct {
        const char *name;
        void *(*function)(CallFrame *);
    } known[] = {
        {"uninitialized", uninitialized},     {"unfilled", unfilled},
        {"take_rows", take_rows},             {"put_rows", put_rows},
        {"instances", instances},             {"read_instances", read_instances},
        {"write_instances", write_instances}, {"row_products", row_products},
        {"row_sums", row_sums},               {"times_matrix", times_matrix},
    };
    PyObject *calls = PyDict_New();
    for (size_t i = 0; calls != NULL && i < sizeof known / sizeof *known; i++) {
        void *address;
        memcpy(&address, &known[i].function, sizeof address); /* C has no cast from functions to data */
        PyObject *capsule = PyCapsule_New(address, NULL, NULL);
        if (capsule == NULL || PyDict_SetItemString(calls, known[i].name, capsule) < 0)
            Py_CLEAR(calls);
        Py_XDECREF(capsule);
    }
    return calls;
}
