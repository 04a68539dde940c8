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
        {"row_products", row_products},       {"times_matrix", times_matrix},
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
