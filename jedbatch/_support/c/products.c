/* Products of rows and a matrix that all rows share, as a function that XLA:CPU calls in compiled
 * programs (see `calls.h`).
 *
 * XLA copies the matrix to the order in which it reads it, whenever it multiplies by it, which takes
 * as long as some twenty rows do. Here numbers of some rows and some vectors of columns are
 * multiplied in registers, and the matrix is read where it is.
 *
 * The numbers of each result are added up in the same order, however many rows there are.
 */

#include "calls.h"

#include <string.h>

enum {
    HEIGHT = 8,   /* rows at a time */
    DEPTH = 256,  /* rows of the matrix at a time, of which a few columns stay in a cache */
};

/* Adds to totals, or sets them if `begins`: of `height` rows, `width` vectors of columns of a matrix
 * of which there are `depth` rows. Rows lie `row`, those of the matrix `column`, totals `stride`
 * numbers apart. */
#define TILE(name, attributes, type, vector, height, width)                                       \
    attributes static void name(const type *rows, size_t row, const type *matrix, size_t column,  \
                                type *totals, size_t stride, int64_t depth, int begins)           \
    {                                                                                              \
        enum { ITEMS = sizeof(vector) / sizeof(type) };                                            \
        vector sums[height][width];                                                                \
        UNROLLED for (int i = 0; i < height; i++)                                                  \
            UNROLLED for (int j = 0; j < width; j++)                                               \
                sums[i][j] = (vector){0};                                                          \
        for (int64_t k = 0; k < depth; k++, matrix += column) {                                    \
            vector factors[width];                                                                 \
            UNROLLED for (int j = 0; j < width; j++)                                               \
                factors[j] = *(const vector *)(matrix + j * ITEMS);                                \
            UNROLLED for (int i = 0; i < height; i++) {                                            \
                UNROLLED for (int j = 0; j < width; j++)                                           \
                    sums[i][j] += rows[(size_t)i * row + (size_t)k] * factors[j];                  \
            }                                                                                      \
        }                                                                                          \
        UNROLLED for (int i = 0; i < height; i++)                                                  \
            UNROLLED for (int j = 0; j < width; j++) {                                             \
                vector *total = (vector *)(totals + (size_t)i * stride + j * ITEMS);               \
                if (!begins)                                                                       \
                    sums[i][j] += *total;                                                          \
                *total = sums[i][j];                                                               \
            }                                                                                      \
    }

/* The totals of all rows for some columns, as above. */
#define PANEL(name, type, tile, tile_of_two, tile_of_one, height)                                 \
    static void name(const type *rows, size_t row, const type *matrix, size_t column,             \
                     type *totals, size_t stride, int64_t depth, int begins, int64_t num_rows)     \
    {                                                                                              \
        int64_t i = 0;                                                                             \
        for (; i + height <= num_rows; i += height)                                                \
            tile(rows + (size_t)i * row, row, matrix, column, totals + (size_t)i * stride, stride, \
                 depth, begins);                                                                   \
        for (; i + 2 <= num_rows; i += 2)                                                          \
            tile_of_two(rows + (size_t)i * row, row, matrix, column,                               \
                        totals + (size_t)i * stride, stride, depth, begins);                       \
        if (i < num_rows)                                                                          \
            tile_of_one(rows + (size_t)i * row, row, matrix, column,                               \
                        totals + (size_t)i * stride, stride, depth, begins);                       \
    }

/* totals [num_rows, n] = rows [num_rows, m] times matrix [m, n]. */
#define PRODUCT(name, type, vector, width, panel, panel_of_one)                                   \
    static void name(const type *rows, const type *matrix, type *totals, int64_t num_rows,         \
                     int64_t m, int64_t n)                                                         \
    {                                                                                              \
        enum { ITEMS = sizeof(vector) / sizeof(type), COLUMNS = width * ITEMS };                   \
        size_t row = (size_t)m, column = (size_t)n;                                                \
        for (int64_t k = 0; k == 0 || k < m; k += DEPTH) {                                         \
            int64_t depth = m - k < DEPTH ? m - k : DEPTH, j = 0;                                  \
            const type *some = matrix + (size_t)k * column;                                        \
            for (; j + COLUMNS <= n; j += COLUMNS)                                                 \
                panel(rows + k, row, some + j, column, totals + j, column, depth, k == 0,          \
                      num_rows);                                                                   \
            for (; j + ITEMS <= n; j += ITEMS)                                                     \
                panel_of_one(rows + k, row, some + j, column, totals + j, column, depth, k == 0,   \
                             num_rows);                                                            \
            if (j == n)                                                                            \
                continue;                                                                          \
            /* what is left of the columns, with zeros behind */                                   \
            type left[DEPTH * ITEMS] = {0}, sums[HEIGHT * ITEMS] = {0};                            \
            size_t size = (size_t)(n - j) * sizeof(type);                                          \
            for (int64_t i = 0; i < depth; i++)                                                    \
                memcpy(left + i * ITEMS, some + (size_t)i * column + j, size);                     \
            for (int64_t i = 0; i < num_rows; i += HEIGHT) {                                       \
                int64_t count = num_rows - i < HEIGHT ? num_rows - i : HEIGHT;                     \
                type *total = totals + (size_t)i * column + j;                                     \
                for (int64_t r = 0; k && r < count; r++)                                           \
                    memcpy(sums + r * ITEMS, total + (size_t)r * column, size);                    \
                panel_of_one(rows + (size_t)i * row + k, row, left, ITEMS, sums, ITEMS, depth,     \
                             k == 0, count);                                                       \
                for (int64_t r = 0; r < count; r++)                                                \
                    memcpy(total + (size_t)r * column, sums + r * ITEMS, size);                    \
            }                                                                                      \
        }                                                                                          \
    }

#define FOR_A_TYPE(suffix, attributes, type, vector, height, width)                               \
    TILE(tile_##suffix, attributes, type, vector, height, width)                                   \
    TILE(two_##suffix, attributes, type, vector, 2, width)                                         \
    TILE(one_##suffix, attributes, type, vector, 1, width)                                         \
    TILE(thin_tile_##suffix, attributes, type, vector, height, 1)                                  \
    TILE(thin_two_##suffix, attributes, type, vector, 2, 1)                                        \
    TILE(thin_one_##suffix, attributes, type, vector, 1, 1)                                        \
    PANEL(panel_##suffix, type, tile_##suffix, two_##suffix, one_##suffix, height)                 \
    PANEL(thin_panel_##suffix, type, thin_tile_##suffix, thin_two_##suffix, thin_one_##suffix,     \
          height)                                                                                  \
    PRODUCT(multiply_##suffix, type, vector, width, panel_##suffix, thin_panel_##suffix)

#define FOR_A_PROCESSOR(suffix, attributes, bytes, height, width)                                 \
    typedef float floats_##suffix VECTOR(bytes, float);                                            \
    typedef double doubles_##suffix VECTOR(bytes, double);                                         \
    FOR_A_TYPE(f_##suffix, attributes, float, floats_##suffix, height, width)                      \
    FOR_A_TYPE(d_##suffix, attributes, double, doubles_##suffix, height, width)

#ifdef __GNUC__
#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif
#define VECTOR(bytes, type) __attribute__((vector_size(bytes), aligned(sizeof(type)), may_alias))
FOR_A_PROCESSOR(any, , 16, 4, 2)
#ifdef __x86_64__
FOR_A_PROCESSOR(avx2, __attribute__((target("avx2,fma"))), 32, 4, 3)
FOR_A_PROCESSOR(avx512, __attribute__((target("avx512f"))), 64, 8, 3)
#endif
#else /* no vectors of any size */
#define UNROLLED
#define VECTOR(bytes, type)
FOR_A_PROCESSOR(any, , 0, 4, 4)
#endif

typedef struct {
    void (*multiply_floats)(const float *, const float *, float *, int64_t, int64_t, int64_t);
    void (*multiply_doubles)(const double *, const double *, double *, int64_t, int64_t, int64_t);
} Functions;

static Functions
functions(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return (Functions){multiply_f_avx512, multiply_d_avx512};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (Functions){multiply_f_avx2, multiply_d_avx2};
#endif
    return (Functions){multiply_f_any, multiply_d_any};
}

/* The products of (rows [lanes, m], matrix [m, n]): [lanes, n]. */
void *
times_matrix(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    const Buffer *rows = frame->arguments.buffers[0], *matrix = frame->arguments.buffers[1];
    void *out = frame->results.buffers[0]->data;
    int64_t num_rows = rows->dims[0], m = matrix->dims[0], n = matrix->dims[1];
    Functions chosen = functions();
    if (rows->dtype == FLOAT32)
        chosen.multiply_floats(rows->data, matrix->data, out, num_rows, m, n);
    else
        chosen.multiply_doubles(rows->data, matrix->data, out, num_rows, m, n);
    return NULL;
}
