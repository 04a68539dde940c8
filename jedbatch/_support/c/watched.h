/* Whether containers hold what they held before (see `watched.c`). */

#ifndef JEDBATCH_WATCHED_H
#define JEDBATCH_WATCHED_H

#include "core.h"

int hold_the_same(PyObject *holders);

#endif
