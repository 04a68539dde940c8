/* A function that XLA:CPU calls to make an array and that leaves it as it is.
 *
 * The structures are those that XLA hands to functions it calls (its "FFI"), as far as they are
 * read here; they are the same in every version since 0.1 of that interface. Source: the comments
 * of `xla/ffi/api/c_api.h`, which jaxlib contains.
 */

#include "core.h"

#include <string.h>

enum { METADATA = 1 };

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
    const Interface *interface;
} CallFrame;

/* Returns NULL, for no error. Where XLA asks for metadata, the version is XLA's own. */
static void *
uninitialized(CallFrame *frame)
{
    for (Extension *x = frame->extensions; x != NULL; x = x->next) {
        if (x->type != METADATA)
            continue;
        Metadata *metadata = ((MetadataExtension *)x)->metadata;
        metadata->version.major = frame->interface->version.major;
        metadata->version.minor = frame->interface->version.minor;
        metadata->traits = 0;
    }
    return NULL;
}

/* uninitialized_handler(): the function as `jax.ffi.register_ffi_target` takes it. */
PyObject *
uninitialized_handler(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    void *handler;
    void *(*function)(CallFrame *) = uninitialized;
    memcpy(&handler, &function, sizeof handler); /* C has no cast from functions to data */
    return PyCapsule_New(handler, NULL, NULL);
}
