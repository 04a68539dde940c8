/* Gradients of weights, as functions that XLA:CPU calls in compiled programs (see `calls.h`).
 *
 * The gradient of a matrix is the sum, over all lanes that are alive, of the products of each number
 * of a row with each of a cotangent. Numbers of rows lie as they are needed, so that nothing is
 * copied before: a few numbers of a row and some vectors of a cotangent are multiplied in registers
 * for some lanes, which are few enough for what they read to stay in the first-level cache.
 *
 * Some lanes are summed up by themselves, one after the other, and that is added to the sum of all:
 * so less is lost by rounding than if each were added to a sum that is much larger. This is the same
 * whatever the processor, but for the rounding of what it multiplies and adds at once.
 */

#include "calls.h"

#include <string.h>

enum { LANES = 64 }; /* at a time */

/* Some lanes, and the part of a gradient that they add to. */
typedef struct {
    const char *rows[LANES], *cotangents[LANES];
    int64_t count; /* of lanes */
} Block;

/* total[i, j] += rows[lane][i] * cotangents[lane][j] for `height` numbers of rows and `width` vectors
 * of cotangents; `stride` numbers lie between rows of the total. */
#define TILE(name, attributes, type, vector, height, width)                                       \
    attributes static void name(const Block *block, size_t row, size_t cotangent, type *total,     \
                                size_t stride)                                                     \
    {                                                                                              \
        enum { ITEMS = sizeof(vector) / sizeof(type) };                                            \
        vector sums[height][width];                                                                \
        UNROLLED for (int i = 0; i < height; i++)                                                  \
            UNROLLED for (int j = 0; j < width; j++)                                               \
                sums[i][j] = (vector){0};                                                          \
        for (int64_t lane = 0; lane < block->count; lane++) {                                      \
            const type *x = (const type *)block->rows[lane] + row;                                 \
            const type *y = (const type *)block->cotangents[lane] + cotangent;                     \
            UNROLLED for (int j = 0; j < width; j++) {                                             \
                vector factor = *(const vector *)(y + j * ITEMS);                                  \
                UNROLLED for (int i = 0; i < height; i++)                                          \
                    sums[i][j] += x[i] * factor;                                                   \
            }                                                                                      \
        }                                                                                          \
        UNROLLED for (int i = 0; i < height; i++)                                                  \
            UNROLLED for (int j = 0; j < width; j++)                                               \
                *(vector *)(total + (size_t)i * stride + j * ITEMS) += sums[i][j];                 \
    }

/* Adds what the lanes of a block add to a gradient of m rows, n numbers each. */
#define PRODUCT(name, attributes, type, vector, height, width, tile, tile_of_one)                 \
    attributes static void name(const Block *block, int64_t m, int64_t n, type *total)             \
    {                                                                                              \
        enum { COLUMNS = width * sizeof(vector) / sizeof(type) };                                  \
        int64_t j = 0;                                                                             \
        for (; j + COLUMNS <= n; j += COLUMNS) {                                                   \
            int64_t i = 0;                                                                         \
            for (; i + height <= m; i += height)                                                   \
                tile(block, (size_t)i, (size_t)j, total + i * n + j, (size_t)n);                   \
            for (; i < m; i++)                                                                     \
                tile_of_one(block, (size_t)i, (size_t)j, total + i * n + j, (size_t)n);            \
        }                                                                                          \
        if (j == n)                                                                                \
            return;                                                                                \
        /* what is left of the cotangents, with zeros behind */                                    \
        type left[LANES * COLUMNS] = {0}, sums[height * COLUMNS];                                  \
        size_t size = (size_t)(n - j) * sizeof(type);                                              \
        Block copy = *block;                                                                       \
        for (int64_t lane = 0; lane < block->count; lane++) {                                      \
            memcpy(left + lane * COLUMNS, (const type *)block->cotangents[lane] + j, size);        \
            copy.cotangents[lane] = (const char *)(left + lane * COLUMNS);                         \
        }                                                                                          \
        for (int64_t i = 0, rows; i < m; i += rows) {                                              \
            rows = i + height <= m ? height : 1;                                                   \
            memset(sums, 0, sizeof(sums));                                                         \
            for (int64_t k = 0; k < rows; k++)                                                     \
                memcpy(sums + k * COLUMNS, total + (i + k) * n + j, size);                         \
            (rows == 1 ? tile_of_one : tile)(&copy, (size_t)i, 0, sums, COLUMNS);                  \
            for (int64_t k = 0; k < rows; k++)                                                     \
                memcpy(total + (i + k) * n + j, sums + k * COLUMNS, size);                         \
        }                                                                                          \
    }

#define FOR_A_PROCESSOR(suffix, attributes, bytes, height, width)                                 \
    typedef float floats_##suffix VECTOR(bytes, float);                                            \
    typedef double doubles_##suffix VECTOR(bytes, double);                                         \
    TILE(tile_f_##suffix, attributes, float, floats_##suffix, height, width)                       \
    TILE(one_f_##suffix, attributes, float, floats_##suffix, 1, width)                             \
    TILE(tile_d_##suffix, attributes, double, doubles_##suffix, height, width)                     \
    TILE(one_d_##suffix, attributes, double, doubles_##suffix, 1, width)                           \
    PRODUCT(add_floats_##suffix, attributes, float, floats_##suffix, height, width,                \
            tile_f_##suffix, one_f_##suffix)                                                       \
    PRODUCT(add_doubles_##suffix, attributes, double, doubles_##suffix, height, width,             \
            tile_d_##suffix, one_d_##suffix)

#ifdef __GNUC__
#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif
#define VECTOR(bytes, type) __attribute__((vector_size(bytes), aligned(sizeof(type)), may_alias))
FOR_A_PROCESSOR(any, , 16, 4, 2)
#ifdef __x86_64__
FOR_A_PROCESSOR(avx2, __attribute__((target("avx2,fma"))), 32, 4, 2)
FOR_A_PROCESSOR(avx512, __attribute__((target("avx512f"))), 64, 6, 4)
#endif
#else /* no vectors of any size */
#define UNROLLED
#define VECTOR(bytes, type)
FOR_A_PROCESSOR(any, , 0, 4, 4)
#endif

typedef struct {
    void (*add_floats)(const Block *, int64_t, int64_t, float *);
    void (*add_doubles)(const Block *, int64_t, int64_t, double *);
} Functions;

static Functions
functions(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return (Functions){add_floats_avx512, add_doubles_avx512};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (Functions){add_floats_avx2, add_doubles_avx2};
#endif
    return (Functions){add_floats_any, add_doubles_any};
}

/* The gradient of a matrix: of (bool[lanes], rows [lanes, m], cotangents [lanes, n]) the sum of their
 * products, [m, n], over the lanes of which the first is true. */
void *
row_products(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer **given = frame->arguments.buffers, *total = frame->results.buffers[0];
    const char *alive = given[0]->data;
    const Buffer *rows = given[1], *cotangents = given[2];
    size_t row = row_size(rows), cotangent = row_size(cotangents);
    int64_t m = total->dims[0], n = total->dims[1], num_lanes = given[0]->dims[0];
    Functions chosen = functions();
    memset(total->data, 0, row_size(total) * (size_t)m);
    for (int64_t lane = 0; lane < num_lanes;) {
        Block block;
        for (block.count = 0; lane < num_lanes && block.count < LANES; lane++) {
            if (!alive[lane])
                continue;
            block.rows[block.count] = (const char *)rows->data + row * (size_t)lane;
            block.cotangents[block.count++] =
                (const char *)cotangents->data + cotangent * (size_t)lane;
        }
        if (total->dtype == FLOAT32)
            chosen.add_floats(&block, m, n, total->data);
        else
            chosen.add_doubles(&block, m, n, total->data);
    }
    return NULL;
}
