"""Arrays of any length: recorded once, and run packed, or padded between nodes.

Read in this order:

1. `needed_rows`: The rows that operations need, which instances of any length may not have.
2. `phases`: A program over ragged arrays as a sequence of phases, none of which pads.
3. `tiling`: Cutting the rows of long instances into tiles.
4. `groups`: Groups: which calls run side by side, padded to one length.
5. `microbatches`: Microbatches: the calls of a minibatch in parts that run one after another.
6. `instance_rows`: Rows of instances that run together, read from packed ones and written.
7. `moving_calls`: Calls to which something comes back: those that have a cotangent other than 0.
8. `packing`: Packed rows: the capacity for them, and where those of a minibatch are.
9. `row_phase`: Phases over rows: equations that do the same to every row, of all instances.
10. `instance_phase`: Phases over instances: equations that take the rows of one instance together.
11. `index_phase`: Phases by index: rows of instances that are read or written by index, of all
   instances at once.
12. `microbatch_loop`: Running a program on one microbatch after another (see
   `_ragged.microbatches`).
13. `shared_values`: Values that follow from what all calls share: they are computed once, before
   all regions.
14. `packed_program`: Running a program in phases on the packed rows of all instances.
15. `padded_programs`: The program of a node on arrays of any length, as a program on padded arrays.
16. `padded_types`: Types of nodes on padded arrays: what takes the place of a node on arrays of any
   length.
17. `regions`: The ragged parts of an instance's graph, taken out of it.
18. `cutting`: Cutting a recorded graph in two: calls of regions, and the graph that is left.
19. `padded_graphs`: Graphs of nodes on padded arrays, made of graphs of nodes on arrays of any
   length.
20. `padded_records`: Records of instances whose arrays [n, ...] travel through their graphs.
21. `length_families`: Families of instances that are equal but for the lengths of their arrays.
22. `lengths`: The arrays of instances that have lengths of their own.
23. `calls`: Calls of regions (see `_ragged.regions`), which run before a graph, all of one region
   together.
24. `row_capacities`: How much room programs have for the calls of a region.
"""
