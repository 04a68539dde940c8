/* Checks of arrays that Python gives, before anything is read through them. */

#ifndef JEDBATCH_CHECKS_H
#define JEDBATCH_CHECKS_H

#include "core.h"

/* Whether all numbers are from 0 to `end - 1`. */
static inline int
are_below(const int32_t *numbers, Py_ssize_t count, int64_t end)
{
    uint32_t largest = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        largest = (uint32_t)numbers[i] > largest ? (uint32_t)numbers[i] : largest;
    return count == 0 || (int64_t)largest < end;
}

/* Whether `count` pointers rise from 0 to `end`. */
static inline int
are_pointers(const int64_t *ptr, Py_ssize_t count, int64_t end)
{
    int fits = count > 0 && ptr[0] == 0 && ptr[count - 1] == end;
    for (Py_ssize_t i = 1; fits && i < count; i++)
        fits = ptr[i - 1] <= ptr[i];
    return fits;
}

#endif
