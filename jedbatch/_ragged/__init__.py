"""Arrays of any length without padding: recorded once, packed, run before the graph.

Read in this order:

1. `axis_rules`: The rules of operations along an axis: each row by itself, or rows together.
2. `phases`: A program over ragged arrays as a sequence of phases, none of which pads.
3. `tiling`: Cutting the rows of long instances into tiles.
4. `row_rules`: Running a row-wise equation for one row.
5. `padded_rules`: Running equations for one instance whose arrays are padded.
6. `groups`: Groups: which calls run side by side where a program over packed rows has no loops.
7. `packing`: Packed rows: the capacity for them, and where those of a minibatch are.
8. `row_phase`: Phases over rows: equations that do the same to every row, of all instances.
9. `instance_phase`: Phases over instances: equations that take the rows of one instance together.
10. `packed_program`: Running a program in phases on the packed rows of all instances.
11. `renaming`: Operations written down so that the names of symbols do not matter.
12. `regions`: The ragged parts of an instance's graph, taken out of it.
13. `lengths`: The arrays of instances that have lengths of their own.
14. `calls`: Calls of regions (see `_ragged.regions`), which run before a graph, all of one region
   together.
"""
