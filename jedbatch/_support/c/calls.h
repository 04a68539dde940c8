/* The structures that XLA hands to functions it calls (its "FFI"), as far as they are read here; they
 * are the same in every version since 0.1 of that interface. Source: the comments of
 * `xla/ffi/api/c_api.h`, which jaxlib contains.
 */

#ifndef JEDBATCH_CALLS_H
#define JEDBATCH_CALLS_H

#include <stddef.h>
#include <stdint.h>

enum { METADATA = 1, FLOAT32 = 11, FLOAT64 = 12 };

typedef struct Extension {
    size_t struct_size;
    int type;
    struct Extension *next;
} Extension;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int major;
    int minor;
} Version;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    Version version;
} Interface;

typedef struct {
    size_t struct_size;
    Version version;
    uint32_t traits;
} Metadata;

typedef struct {
    Extension base;
    Metadata *metadata;
} MetadataExtension;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} Buffer;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int64_t size;
    int *types;
    Buffer **buffers;
} BufferList; /* of arguments, or of results */

typedef struct {
    int dtype;
    size_t size;
    int64_t *data;
} NumberList;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    int64_t size;
    int *types;
    void *names;
    NumberList **values;
} Attributes;

typedef struct {
    size_t struct_size;
    Extension *extensions;
    const Interface *interface;
    void *context;
    int stage;
    BufferList arguments;
    BufferList results;
    Attributes attributes;
} CallFrame;

/* Whether XLA asks for metadata only; the version is XLA's own. */
static inline int
asks_for_metadata(CallFrame *frame)
{
    for (Extension *x = frame->extensions; x != NULL; x = x->next) {
        if (x->type != METADATA)
            continue;
        Metadata *metadata = ((MetadataExtension *)x)->metadata;
        metadata->version.major = frame->interface->version.major;
        metadata->version.minor = frame->interface->version.minor;
        metadata->traits = 0;
        return 1;
    }
    return 0;
}

static inline size_t
item_size(int dtype)
{
    switch (dtype) {
    case 3: case 7: case 10: case 16: /* int16, uint16, float16, bfloat16 */
        return 2;
    case 4: case 8: case FLOAT32: /* int32, uint32 */
        return 4;
    case 5: case 9: case FLOAT64: case 15: /* int64, uint64, complex64 */
        return 8;
    case 18: /* complex128 */
        return 16;
    default: /* bool, int8, uint8, float8 (see `has_whole_bytes` in `_jaxpr/native_calls.py`) */
        return 1;
    }
}

static inline size_t
row_size(const Buffer *x)
{
    size_t size = item_size(x->dtype);
    for (int64_t i = 1; i < x->rank; i++)
        size *= (size_t)x->dims[i];
    return size;
}

/* An index, or the next one that exists of so many. */
static inline int64_t
clamped(int64_t index, int64_t count)
{
    return index < 0 || count <= 0 ? 0 : index < count ? index : count - 1;
}

/* The functions that are not in `calls.c`. */
void *row_products(CallFrame *frame);
void *times_matrix(CallFrame *frame);

#endif
