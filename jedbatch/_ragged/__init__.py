"""Arrays of any length without padding: recorded once, and run packed or as tiles.

Read in this order:

1. `axis_rules`: The rules of operations along an axis: each row by itself, or rows together.
2. `indexing`: Rows read and written by index: gathers and scatters among the rows of an instance.
3. `phases`: A program over ragged arrays as a sequence of phases, none of which pads.
4. `tiling`: Cutting the rows of long instances into tiles.
5. `row_rules`: Running a row-wise equation for one row.
6. `padded_loops`: Loops and branches on padded arrays, of as many steps as each instance needs.
7. `softmax`: Softmax along ragged axes: one selection instead of one for every operation.
8. `padded_rules`: Running equations for one instance whose arrays are padded.
9. `groups`: Groups: which calls run side by side where a program over packed rows has no loops.
10. `microbatches`: Microbatches: the calls of a minibatch in parts that run one after another.
11. `instance_rows`: Instances that run together: which they are, and their rows, read and written.
12. `moving_calls`: Calls to which something comes back: those with a cotangent other than 0.
13. `packing`: Packed rows: the capacity for them, and where those of a minibatch are.
14. `row_phase`: Phases over rows: equations that do the same to every row, of all instances.
15. `instance_phase`: Phases over instances: equations that take the rows of one instance together.
16. `index_phase`: Phases by index: rows of instances that are read or written by index, of all
   instances at once.
17. `microbatch_loop`: Running a program on one microbatch after another.
18. `shared_values`: Values that follow from what all calls share.
19. `packed_program`: Running a program in phases on the packed rows of all instances.
20. `renaming`: Operations written down so that the names of symbols do not matter.
21. `tile_reductions`: Reductions over the rows of arrays, tile by tile.
22. `tile_steps`: The program of a node on ragged values as steps on tiles, of a fixed number of
   rows each.
23. `tile_types`: Types of nodes on tiles: what takes the place of a node on arrays of any length.
24. `regions`: The ragged parts of an instance's graph, taken out of it.
25. `tiled_graph`: Graphs of nodes on tiles, of instances of any length.
26. `tiled_records`: Records of instances whose arrays [n, ...] travel through their graphs as
   tiles.
27. `lengths`: The arrays of instances that have lengths of their own.
28. `calls`: Calls of regions (see `_ragged.regions`), which run before a graph, all of one region
   together.
29. `row_capacities`: How much room programs have for the calls of a region.
"""
