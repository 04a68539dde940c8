"""Arrays of any length without padding: recorded once, packed, run before the graph.

Read in this order:

1. `axis_rules`: What operations do along an axis: each row by itself, or rows together.
2. `phases`: A program over ragged arrays as a sequence of phases, none of which pads.
3. `tiling`: Cutting the rows of long instances into tiles.
4. `lane_rules`: Running operations of symbolic shape, for one row or for one instance.
5. `groups`: Groups: which calls run side by side where a program over packed rows has no loops.
6. `packing`: Packed rows: room for them, and where a minibatch has them.
7. `row_phase`: Phases over rows: what is done to every row alike, for the rows of all instances.
8. `instance_phase`: Phases over instances: what takes the rows of one instance together.
9. `packed_program`: Running a program in phases on the packed rows of all instances.
10. `renaming`: Operations written down so that the names of symbols do not matter.
11. `regions`: The ragged parts of an instance's graph, taken out of it.
12. `lengths`: Which arrays of instances have lengths of their own.
13. `calls`: What runs before a graph: the calls of its regions (see `_ragged.regions`), all of
   one region together.
"""
