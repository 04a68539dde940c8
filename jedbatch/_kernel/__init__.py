"""A node type as a program for one lane: forwards, its VJP, and packed products.

Read in this order:

1. `target`: The targets of compilation: constants that differ between kinds of devices, in one
   place.
2. `products`: The products of a cell with weights: finding them.
3. `covering`: Covering a table by few rectangles: which products of a cell become one.
4. `pack`: Products of a cell with weights, put together: as few and as large as its dependencies
   allow.
5. `sums_over_lanes`: Sums over the lanes that are alive, of products of several rows of each:
   gradients of weights.
6. `weight_gradients`: Gradients of consts: from the rows that they met, and the cotangents of
   what came of it.
7. `residuals`: Residuals: what the reverse of a kernel reads of the forward pass, and where it
   finds it.
8. `vjp`: The reverse of a kernel: what it saves, what it sends back, and gradients of weights.
9. `operand_lists`: Lists of operands, which the program of a lane takes as one array.
10. `factors`: Products of two matrices of each lane, with factors laid out as XLA:CPU multiplies
   them fastest.
11. `rows_times_matrix`: Products of a vector of each lane and a matrix that all lanes share, by
   calls of the core.
12. `kernel`: The program of a node type for one lane, forwards and backwards.
13. `kernel_spec`: `KernelSpec`: a kernel as far as planning asks for it, without its program.
"""
