"""Arrays of any length without padding: recorded once, and run packed or as tiles.

Read in this order:

1. `axis_rules`: The rules of operations along an axis: each row by itself, or rows together.
2. `indexing`: Rows read and written by index: gathers and scatters among the rows of an instance.
3. `phases`: A program over ragged arrays as a sequence of phases, none of which pads.
4. `tiling`: Cutting the rows of long instances into tiles.
5. `row_rules`: Running a row-wise equation for one row.
6. `padded_rules`: Running equations for one instance whose arrays are padded.
7. `groups`: Groups: which calls run side by side where a program over packed rows has no loops.
8. `packing`: Packed rows: the capacity for them, and where those of a minibatch are.
9. `row_phase`: Phases over rows: equations that do the same to every row, of all instances.
10. `instance_phase`: Phases over instances: equations that take the rows of one instance together.
11. `index_phase`: Phases by index: rows of instances that are read or written by index, of all
   instances at once.
12. `packed_program`: Running a program in phases on the packed rows of all instances.
13. `renaming`: Operations written down so that the names of symbols do not matter.
14. `tile_reductions`: Reductions over the rows of arrays, tile by tile.
15. `tile_steps`: The program of a node on ragged values as steps on tiles, of a fixed number of
   rows each.
16. `tile_types`: Types of nodes on tiles: what takes the place of a node on arrays of any length.
17. `regions`: The ragged parts of an instance's graph, taken out of it.
18. `tiled_graph`: Graphs of nodes on tiles, of instances of any length.
19. `tiled_records`: Records of instances whose arrays [n, ...] travel through their graphs as
   tiles.
20. `lengths`: The arrays of instances that have lengths of their own.
21. `calls`: Calls of regions (see `_ragged.regions`), which run before a graph, all of one region
   together.
"""
