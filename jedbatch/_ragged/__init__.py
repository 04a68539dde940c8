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
9. `singular`: Operations whose derivatives may be infinite in the padding of an instance, and only
   there.
10. `padded_rules`: Running equations for one instance whose arrays are padded.
11. `groups`: Groups: which calls run side by side where a program over packed rows has no loops.
12. `microbatches`: Microbatches: the calls of a minibatch in parts that run one after another.
13. `instance_rows`: Instances that run together: which they are, and their rows, read and written.
14. `moving_calls`: Calls to which something comes back: those with a cotangent other than 0.
15. `packing`: Packed rows: the capacity for them, and where those of a minibatch are.
16. `row_phase`: Phases over rows: equations that do the same to every row, of all instances.
17. `attention`: Attention among the rows of each instance, by one call of the compiled core.
18. `instance_phase`: Phases over instances: equations that take the rows of one instance together.
19. `index_phase`: Phases by index: rows of instances that are read or written by index, of all
   instances at once.
20. `microbatch_loop`: Running a program on one microbatch after another.
21. `shared_values`: Values that follow from what all calls share.
22. `packed_program`: Running a program in phases on the packed rows of all instances.
23. `tile_reductions`: Reductions over the rows of arrays, tile by tile.
24. `tile_steps`: The program of a node on ragged values as steps on tiles, of a fixed number of
   rows each.
25. `joined_tiles`: The program of a node as one node that reads all tiles of its arrays.
26. `tile_types`: Types of nodes on tiles: what takes the place of a node on arrays of any length.
27. `regions`: The ragged parts of an instance's graph, taken out of it.
28. `joined_nodes`: Nodes whose values cannot be cut into tiles, as one node with all between them.
29. `cutting`: Cutting a recorded graph in two: calls of regions, and the graph that is left.
30. `tiled_graph`: Graphs of nodes on tiles, of instances of any length.
31. `tile_templates`: Templates of recorded graphs: what graphs of nodes on arrays become, for all
    lengths.
32. `tiled_arrays`: Arrays of instances cut into tiles.
33. `tiled_records`: Records of instances whose arrays [n, ...] travel through their graphs as
   tiles.
34. `length_families`: Families of instances that are equal but for the lengths of their arrays.
35. `lengths`: The arrays of instances that have lengths of their own.
36. `calls`: Calls of regions (see `_ragged.regions`), which run before a graph, all of one region
   together.
37. `row_capacities`: How much room programs have for the calls of a region.
"""
