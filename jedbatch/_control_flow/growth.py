"""The capacity of the programs of rounds, and how it grows.

A program has room for some number of lanes. When they are used up, arenas move to a program with
room for more; the largest program is remembered, so the next minibatch starts with it.
"""

from jedbatch._jaxpr.storage import row_bytes, stored
from jedbatch._kernel.target import Target
from jedbatch._program.capacity import Capacity, round_up
from jedbatch._program.signature import Signature

CAPACITY_GROWTH = 4  # times the capacity that is needed when more is needed
FIRST_GROWTH = 64  # times what is needed that there is room for at first, but at most
FIRST_BYTES = 1 << 22  # of results of a type, and
FEW_BYTES = 1 << 14  # of inputs of a kind

NO_CAPACITY = Capacity(
    {"lanes": {}, "widest": {}, "inputs": {}, "outputs": {}, "num_instructions": {None: 0}}
)
GROWTH_POLICY = {
    "lanes": lambda n: round_up(CAPACITY_GROWTH * n),
    "widest": lambda n: n,
    "inputs": lambda n: round_up(CAPACITY_GROWTH * n),
    "outputs": round_up,
    "num_instructions": lambda n: round_up(CAPACITY_GROWTH * n),
}


def grown_program(capacity: Capacity, need: Capacity, target: Target) -> Signature:
    """Returns a program of some capacity, and of more where more is needed.

    Args:
      capacity: of the program before.
      need: lanes in all, widths compiled and input rows; rows returned and instructions at a time.
      target: what to make a program for.
    """
    larger = capacity.grown(need, GROWTH_POLICY)
    lanes = dict(larger["lanes"])
    for kernel, num_widths in larger["widest"].items():
        lanes[kernel] = max(lanes[kernel], kernel.buckets.widths[num_widths - 1])
        if kernel not in capacity["lanes"]:
            of_bytes = FIRST_BYTES // max(1, kernel.result_bytes)
            start = min(of_bytes, FIRST_GROWTH * need["lanes"][kernel])
            lanes[kernel] = max(lanes[kernel], round_up(start))
    kinds = [stored(t) for kernel in lanes for t in (*kernel.operands, *kernel.results)]
    inputs = {**dict.fromkeys(kinds, 0), **larger["inputs"]}
    for kind, count in need["inputs"].items():  # of numbers, those of many decisions
        if inputs[kind] > capacity["inputs"].get(kind, 0):
            few = min(FEW_BYTES // max(1, row_bytes(kind)), FIRST_GROWTH * count)
            inputs[kind] = max(inputs[kind], round_up(few))
    written = {stored(t) for kernel in lanes for t in kernel.results}
    for kind in kinds:  # kernels that have not run yet read some row of every arena
        if kind not in written:
            inputs[kind] = max(1, inputs[kind])
    sizes = {**larger.sizes, "lanes": lanes, "inputs": inputs, "shared_rows": {}}
    return Signature.of(Capacity(sizes), target, {}, reuse=False)
