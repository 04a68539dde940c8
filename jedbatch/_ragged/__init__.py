"""Arrays of any length without padding: recorded once, and run packed or as tiles.

Read in this order:

1. `axis_rules`: The rules of operations along an axis: each row by itself, or rows together.
2. `indexing`: Rows read and written by index: gathers and scatters among the rows of an instance.
3. `needed_rows`: The rows that operations need, which instances of any length may not have.
4. `phases`: A program over ragged arrays as a sequence of phases, none of which pads.
5. `tiling`: Cutting the rows of long instances into tiles.
6. `row_rules`: Running a row-wise equation for one row.
7. `padded_loops`: Loops and branches on padded arrays, of as many steps as each instance needs.
8. `softmax`: Softmax along ragged axes: one selection instead of one for every operation.
9. `padded_rules`: Running equations for one instance whose arrays are padded.
10. `groups`: Groups: which calls run side by side where a program over packed rows has no loops.
11. `microbatches`: Microbatches: the calls of a minibatch in parts that run one after another.
12. `instance_rows`: Instances that run together: which they are, and their rows, read and written.
13. `moving_calls`: Calls to which something comes back: those with a cotangent other than 0.
14. `packing`: Packed rows: the capacity for them, and where those of a minibatch are.
15. `row_phase`: Phases over rows: equations that do the same to every row, of all instances.
16. `instance_phase`: Phases over instances: equations that take the rows of one instance together.
17. `index_phase`: Phases by index: rows of instances that are read or written by index, of all
   instances at once.
18. `microbatch_loop`: Running a program on one microbatch after another.
19. `shared_values`: Values that follow from what all calls share.
20. `packed_program`: Running a program in phases on the packed rows of all instances.
21. `renaming`: Operations written down so that the names of symbols do not matter.
22. `tile_reductions`: Reductions over the rows of arrays, tile by tile.
23. `tile_steps`: The program of a node on ragged values as steps on tiles, of a fixed number of
   rows each.
24. `tile_types`: Types of nodes on tiles: what takes the place of a node on arrays of any length.
25. `regions`: The ragged parts of an instance's graph, taken out of it.
26. `tiled_graph`: Graphs of nodes on tiles, of instances of any length.
27. `tiled_records`: Records of instances whose arrays [n, ...] travel through their graphs as
   tiles.
28. `lengths`: The arrays of instances that have lengths of their own.
29. `calls`: Calls of regions (see `_ragged.regions`), which run before a graph, all of one region
   together.
30. `row_capacities`: How much room programs have for the calls of a region.
"""
