/* What an instance records between two decisions (see `_control_flow/steps.py`). */

#ifndef JEDBATCH_STEPS_H
#define JEDBATCH_STEPS_H

#include "ints.h"

enum { CALLS, REFERENCES, GROUPS, COUNTER, NUM_SIZES }; /* the columns of a recording */
enum { NODES, READS, INPUTS, VALUES };                  /* its sizes */

/* A row of the table of steps. */
typedef struct {
    int64_t before[NUM_SIZES], last[NUM_SIZES], counts[NUM_SIZES], now[NUM_SIZES], read;
} Step;

/* Notes that a step ends, given the value that it needs; returns whether it is the same as the step
 * before. */
int end_step(Ints *const *columns, Step *step, int64_t value);

#endif
