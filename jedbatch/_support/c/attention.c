/* Attention among the rows of each call, which XLA:CPU calls in compiled programs:
 *
 *     out = softmax(scale * q k') v        of every head, for the rows of every call
 *
 * Rows are packed, call after call (see `_ragged/packing.py`), so nothing is padded but the ends of
 * vectors, and no score outlives its head. The reverse computes them again. Sums are in the order of
 * rows, whatever the other calls are.
 */

#include "calls.h"

#ifdef HAS_ATTENTION

#include <stdlib.h>
#include <string.h>

enum { LANES = 16, BLOCK = 4 }; /* numbers in a vector; rows of queries at a time */

#ifdef __x86_64__ /* code for wide vectors is made, too, and chosen where it runs */
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Packed rows: those of each call follow those of the one before. */
typedef struct {
    const int32_t *starts; /* the first of each call */
    int64_t total;
} Rows;

/* Says of (q, k, v, ...) which rows they are of. */
typedef struct {
    int64_t num_heads, width, value_width; /* numbers of a query and of a value, in each head */
    float scale;
    Rows queries, keys; /* values are those of keys */
    int64_t num_calls;
} Form;

/* What is computed of one head of one call: arrays are padded to whole vectors. */
typedef struct {
    int64_t keys;       /* numbers in a row of scores */
    float *turned;      /* [width, keys] of k */
    float *values;      /* [keys, value columns] */
    float *scores;      /* [BLOCK, keys] */
    float *out;         /* [BLOCK, value columns] */
    float *queries;     /* [BLOCK, columns] */
    float *turned_v;    /* [value width, keys]; from here on in the reverse alone */
    float *own_keys;    /* [keys, columns] */
    float *of_scores;   /* [BLOCK, keys] */
    float *of_out;      /* [BLOCK, value columns] */
    float *of_keys;     /* [keys, columns] */
    float *of_values;   /* [keys, value columns] */
    float *of_queries;  /* [BLOCK, columns] */
} Room;

static int64_t
padded(int64_t count)
{
    return (count + LANES - 1) / LANES * LANES;
}

typedef union {
    float number;
    int32_t bits;
} Bits;

/* exp of a number that is not positive, or not a number, to about one unit in the last place; 0
 * where that has no normal number. Source: Cephes' expf. */
INLINE float
exponential(float x)
{
    Bits round = {x * 1.44269504088896341f + 12582912.0f}, out;
    float power = round.number - 12582912.0f;
    float r = x - power * 0.693359375f + power * 2.12194440e-4f;
    float p = ((((1.9875691500E-4f * r + 1.3981999507E-3f) * r + 8.3334519073E-3f) * r +
                4.1665795894E-2f) * r + 1.6666665459E-1f) * r + 5.0000001201E-1f;
    out.number = p * r * r + r + 1.0f;
    out.bits += (int32_t)((uint32_t)round.bits << 23);
    out.number = x != x ? x : out.number;
    return x < -87.0f ? 0.0f : out.number;
}

/* out[BLOCK, columns] = left[BLOCK, depth] right[depth, columns] */
INLINE void
multiply(float *out, int64_t columns, const float *left, int64_t left_step, const float *right,
         int64_t depth)
{
    for (int64_t c = 0; c < columns; c += LANES) {
        Vector sums[BLOCK] = {{0}};
        for (int64_t i = 0; i < depth; i++) {
            Vector x = *(const Vector *)(right + i * columns + c);
            for (int r = 0; r < BLOCK; r++)
                sums[r] += left[r * left_step + i] * x;
        }
        for (int r = 0; r < BLOCK; r++)
            *(Vector *)(out + r * columns + c) = sums[r];
    }
}

/* out[rows, columns] += left[BLOCK, rows]' right[BLOCK, columns] */
INLINE void
multiply_turned(float *out, int64_t columns, const float *left, int64_t left_step,
                const float *right, int64_t rows)
{
    for (int64_t c = 0; c < columns; c += LANES) {
        Vector x[BLOCK];
        for (int r = 0; r < BLOCK; r++)
            x[r] = *(const Vector *)(right + r * columns + c);
        for (int64_t i = 0; i < rows; i++) {
            Vector sum = *(Vector *)(out + i * columns + c);
            for (int r = 0; r < BLOCK; r++)
                sum += left[r * left_step + i] * x[r];
            *(Vector *)(out + i * columns + c) = sum;
        }
    }
}

/* The sum of a vector's numbers. */
INLINE float
sum_of(const Vector *x)
{
    float total = 0;
    for (int l = 0; l < LANES; l++)
        total += (*x)[l];
    return total;
}

/* The weights of BLOCK queries, from their scores; those of no key are 0. */
INLINE void
normalize(float *scores, int64_t keys, int64_t count, float scale)
{
    for (int r = 0; r < BLOCK; r++, scores += keys) {
        for (int64_t j = count; j < keys; j++)
            scores[j] = scale < 0 ? __builtin_inff() : -__builtin_inff();
        float most[LANES];
        for (int l = 0; l < LANES; l++)
            most[l] = scores[l] * scale;
        for (int64_t j = 0; j < keys; j += LANES)
            for (int l = 0; l < LANES; l++) {
                float x = scores[j + l] *= scale;
                most[l] = x > most[l] ? x : most[l];
            }
        float largest = most[0];
        for (int l = 1; l < LANES; l++)
            largest = most[l] > largest ? most[l] : largest;
        for (int64_t j = 0; j < keys; j++)
            scores[j] = exponential(scores[j] - largest);
        Vector sums = {0};
        for (int64_t j = 0; j < keys; j += LANES)
            sums += *(Vector *)(scores + j);
        float share = 1 / sum_of(&sums);
        for (int64_t j = 0; j < keys; j += LANES)
            *(Vector *)(scores + j) *= share;
    }
}

/* Copies one head of rows, [rows, columns] of what has `step` numbers in a row; the rest is 0. */
INLINE void
copy_head(float *out, int64_t columns, int64_t rows, const float *x, int64_t step, int64_t width,
          int64_t count)
{
    for (int64_t i = 0; i < rows; i++, out += columns) {
        int64_t there = i < count ? width : 0;
        if (there)
            memcpy(out, x + i * step, sizeof(float) * (size_t)there);
        for (int64_t c = there; c < columns; c++)
            out[c] = 0;
    }
}

/* The same, turned: [width, columns] of `count` rows. */
INLINE void
turn_head(float *out, int64_t columns, const float *x, int64_t step, int64_t width, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < width; c++)
            out[c * columns + i] = x[i * step + c];
    for (int64_t c = 0; c < width; c++)
        for (int64_t i = count; i < columns; i++)
            out[c * columns + i] = 0;
}

INLINE void
add_head(float *out, int64_t step, const float *x, int64_t columns, int64_t width, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < width; c++)
            out[i * step + c] += x[i * columns + c];
}

static Form
form_of(CallFrame *frame, const int32_t *table)
{
    const int64_t *numbers = frame->attributes.values[0]->data;
    double scale;
    memcpy(&scale, numbers + 3, sizeof scale);
    Form form = {numbers[0],
                 numbers[1],
                 numbers[2],
                 (float)scale,
                 {table + numbers[4], table[numbers[5]]},
                 {table + numbers[6], table[numbers[7]]},
                 table[numbers[8]]};
    return form;
}

/* How many rows a call has. */
static int64_t
rows_of(const Form *of, const Rows *rows, int64_t call)
{
    int64_t end = call + 1 < of->num_calls ? rows->starts[call + 1] : rows->total;
    return end - rows->starts[call];
}

/* Makes room for the longest call; returns the memory. */
static float *
make_room(const Form *of, Room *room, int reverse)
{
    int64_t longest = 0, columns = padded(of->width), value_columns = padded(of->value_width);
    for (int64_t i = 0; i < of->num_calls; i++) {
        int64_t count = rows_of(of, &of->keys, i);
        longest = count > longest ? count : longest;
    }
    int64_t keys = padded(longest);
    const struct {
        float **part;
        int64_t size;
    } parts[] = {
        {&room->turned, of->width * keys},          {&room->values, keys * value_columns},
        {&room->scores, BLOCK * keys},              {&room->out, BLOCK * value_columns},
        {&room->queries, BLOCK * columns},          {&room->turned_v, of->value_width * keys},
        {&room->own_keys, keys * columns},          {&room->of_scores, BLOCK * keys},
        {&room->of_out, BLOCK * value_columns},     {&room->of_keys, keys * columns},
        {&room->of_values, keys * value_columns},   {&room->of_queries, BLOCK * columns},
    };
    size_t count = reverse ? sizeof parts / sizeof *parts : 5, total = 1;
    for (size_t i = 0; i < count; i++)
        total += (size_t)parts[i].size;
    float *memory = malloc(total * sizeof *memory), *at = memory;
    if (memory == NULL)
        abort(); /* as XLA does */
    for (size_t i = 0; i < count; at += parts[i].size, i++)
        *parts[i].part = at;
    return memory;
}

/* One head of one call: its first rows, and what comes back. */
typedef struct {
    const float *q, *k, *v, *of_out;
    float *out, *of_q, *of_k, *of_v;
    int64_t queries, keys; /* how many there are */
} Head;

WIDE static void
run_head(const Form *of, const Room *room, const Head *head)
{
    int64_t step = of->num_heads * of->width, value_step = of->num_heads * of->value_width;
    int64_t keys = padded(head->keys);
    int64_t width = padded(of->width), columns = padded(of->value_width);
    turn_head(room->turned, keys, head->k, step, of->width, head->keys);
    copy_head(room->values, columns, head->keys, head->v, value_step, of->value_width, head->keys);
    for (int64_t i = 0; i < head->queries; i += BLOCK) {
        int64_t there = head->queries - i < BLOCK ? head->queries - i : BLOCK;
        copy_head(room->queries, width, BLOCK, head->q + i * step, step, of->width, there);
        multiply(room->scores, keys, room->queries, width, room->turned, of->width);
        normalize(room->scores, keys, head->keys, of->scale);
        multiply(room->out, columns, room->scores, keys, room->values, head->keys);
        for (int64_t r = 0; r < there; r++)
            memcpy(head->out + (i + r) * value_step, room->out + r * columns,
                   sizeof(float) * (size_t)of->value_width);
    }
}

WIDE static void
pull_head(const Form *of, const Room *room, const Head *head)
{
    int64_t step = of->num_heads * of->width, value_step = of->num_heads * of->value_width;
    int64_t keys = padded(head->keys);
    int64_t columns = padded(of->width), value_columns = padded(of->value_width);
    turn_head(room->turned, keys, head->k, step, of->width, head->keys);
    turn_head(room->turned_v, keys, head->v, value_step, of->value_width, head->keys);
    copy_head(room->own_keys, columns, head->keys, head->k, step, of->width, head->keys);
    memset(room->of_keys, 0, sizeof(float) * (size_t)(head->keys * columns));
    memset(room->of_values, 0, sizeof(float) * (size_t)(head->keys * value_columns));
    for (int64_t i = 0; i < head->queries; i += BLOCK) {
        int64_t there = head->queries - i < BLOCK ? head->queries - i : BLOCK;
        copy_head(room->queries, columns, BLOCK, head->q + i * step, step, of->width, there);
        copy_head(room->of_out, value_columns, BLOCK, head->of_out + i * value_step, value_step,
                  of->value_width, there);
        multiply(room->scores, keys, room->queries, columns, room->turned, of->width);
        normalize(room->scores, keys, head->keys, of->scale);
        /* Of no query there are no weights, which might be no numbers, either. */
        memset(room->scores + there * keys, 0, sizeof(float) * (size_t)((BLOCK - there) * keys));
        multiply_turned(room->of_values, value_columns, room->scores, keys, room->of_out,
                        head->keys);
        multiply(room->of_scores, keys, room->of_out, value_columns, room->turned_v,
                 of->value_width);
        for (int r = 0; r < BLOCK; r++) {
            float *x = room->of_scores + r * keys, *weights = room->scores + r * keys;
            Vector sums = {0};
            for (int64_t j = 0; j < keys; j += LANES)
                sums += *(Vector *)(x + j) * *(Vector *)(weights + j);
            float total = sum_of(&sums);
            for (int64_t j = 0; j < keys; j += LANES)
                *(Vector *)(x + j) =
                    of->scale * *(Vector *)(weights + j) * (*(Vector *)(x + j) - total);
        }
        multiply_turned(room->of_keys, columns, room->of_scores, keys, room->queries, head->keys);
        multiply(room->of_queries, columns, room->of_scores, keys, room->own_keys, head->keys);
        add_head(head->of_q + i * step, step, room->of_queries, columns, of->width, there);
    }
    add_head(head->of_k, step, room->of_keys, columns, of->width, head->keys);
    add_head(head->of_v, value_step, room->of_values, value_columns, of->value_width, head->keys);
}

/* Of (table, q, k, v), packed rows, the results of all queries; rows of no call are zeros. The
 * numbers are those of `form_of`. */
void *
attention(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer **given = frame->arguments.buffers, *result = frame->results.buffers[0];
    Form of = form_of(frame, given[0]->data);
    int64_t step = of.num_heads * of.width, value_step = of.num_heads * of.value_width;
    Room room;
    float *memory = make_room(&of, &room, 0), *out = result->data;
    for (int64_t i = 0; i < of.num_calls; i++) {
        int64_t q = of.queries.starts[i], k = of.keys.starts[i];
        for (int64_t h = 0; h < of.num_heads; h++) {
            Head head = {.q = (float *)given[1]->data + q * step + h * of.width,
                         .k = (float *)given[2]->data + k * step + h * of.width,
                         .v = (float *)given[3]->data + k * value_step + h * of.value_width,
                         .out = out + q * value_step + h * of.value_width,
                         .queries = rows_of(&of, &of.queries, i),
                         .keys = rows_of(&of, &of.keys, i)};
            run_head(&of, &room, &head);
        }
    }
    free(memory);
    int64_t end = of.queries.total;
    memset(out + end * value_step, 0, row_size(result) * (size_t)(result->dims[0] - end));
    return NULL;
}

/* Of (table, q, k, v, which calls, cotangents of the results), what comes back to q, k and v: the
 * last three numbers say to which result each of them is added. */
void *
attention_back(CallFrame *frame)
{
    if (asks_for_metadata(frame))
        return NULL;
    Buffer **given = frame->arguments.buffers, **results = frame->results.buffers;
    Form of = form_of(frame, given[0]->data);
    const int64_t *places = (int64_t *)frame->attributes.values[0]->data + 9;
    const char *moves = given[4]->data;
    int64_t step = of.num_heads * of.width, value_step = of.num_heads * of.value_width;
    Room room;
    float *memory = make_room(&of, &room, 1);
    for (int64_t i = 0; i < frame->results.size; i++)
        memset(results[i]->data, 0, row_size(results[i]) * (size_t)results[i]->dims[0]);
    for (int64_t i = 0; i < of.num_calls; i++) {
        int64_t q = of.queries.starts[i], k = of.keys.starts[i];
        for (int64_t h = 0; moves[i] && h < of.num_heads; h++) {
            int64_t own = h * of.width, value = h * of.value_width;
            Head head = {.q = (float *)given[1]->data + q * step + own,
                         .k = (float *)given[2]->data + k * step + own,
                         .v = (float *)given[3]->data + k * value_step + value,
                         .of_out = (float *)given[5]->data + q * value_step + value,
                         .of_q = (float *)results[places[0]]->data + q * step + own,
                         .of_k = (float *)results[places[1]]->data + k * step + own,
                         .of_v = (float *)results[places[2]]->data + k * value_step + value,
                         .queries = rows_of(&of, &of.queries, i),
                         .keys = rows_of(&of, &of.keys, i)};
            pull_head(&of, &room, &head);
        }
    }
    free(memory);
    return NULL;
}

#endif
