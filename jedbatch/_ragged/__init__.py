"""Arrays of any length without padding: recorded once, and run packed or as tiles.

Read in this order:

1. `needed_rows`: The rows that operations need, which instances of any length may not have.
2. `phases`: A program over ragged arrays as a sequence of phases, none of which pads.
3. `tiling`: Cutting the rows of long instances into tiles.
4. `groups`: Groups: which calls run side by side where a program over packed rows has no loops.
5. `microbatches`: Microbatches: the calls of a minibatch in parts that run one after another.
6. `instance_rows`: Rows of instances that run together, read from packed ones and written.
7. `moving_calls`: Calls to which something comes back: those with a cotangent other than 0.
8. `packing`: Packed rows: the capacity for them, and where those of a minibatch are.
9. `row_phase`: Phases over rows: equations that do the same to every row, of all instances.
10. `instance_phase`: Phases over instances: equations that take the rows of one instance together.
11. `index_phase`: Phases by index: rows of instances that are read or written by index, of all
   instances at once.
12. `microbatch_loop`: Running a program on one microbatch after another.
13. `shared_values`: Values that follow from what all calls share.
14. `packed_program`: Running a program in phases on the packed rows of all instances.
15. `tile_reductions`: Reductions over the rows of arrays, tile by tile.
16. `tile_steps`: The program of a node on ragged values as steps on tiles, of a fixed number of
   rows each.
17. `joined_tiles`: The program of a node as one node that reads all tiles of its arrays.
18. `tile_types`: Types of nodes on tiles: what takes the place of a node on arrays of any length.
19. `regions`: The ragged parts of an instance's graph, taken out of it.
20. `joined_nodes`: Nodes whose values cannot be cut into tiles, as one node with all between them.
21. `cutting`: Cutting a recorded graph in two: calls of regions, and the graph that is left.
22. `tiled_graph`: Graphs of nodes on tiles, of instances of any length.
23. `tile_templates`: Templates of recorded graphs: what graphs of nodes on arrays become, for all
   lengths.
24. `tiled_arrays`: Arrays of instances cut into tiles.
25. `tiled_records`: Records of instances whose arrays [n, ...] travel through their graphs as
   tiles.
26. `length_families`: Families of instances that are equal but for the lengths of their arrays.
27. `lengths`: The arrays of instances that have lengths of their own.
28. `calls`: Calls of regions (see `_ragged.regions`), which run before a graph, all of one region
   together.
29. `row_capacities`: How much room programs have for the calls of a region.
"""
