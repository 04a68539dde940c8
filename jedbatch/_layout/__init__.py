"""The order in a batch, rows in memory, and how operands are read. NumPy only.

Read in this order:

1. `bucketing`: Widths: into which chunks a batch is cut.
2. `access`: Reading operands: as slices where their rows are consecutive, one by one where not.
3. `allocator`: Placing blocks of rows that live for a while so that few rows are needed in all.
4. `pq_tree`: Orders in which given sets are consecutive: the PQ-tree of Booth and Lueker.
5. `pq_planner`: An order of variables in memory in which batches read and write without
   gathering.
6. `node_order`: The order of nodes inside of a batch: it says which operands are slices.
7. `live_ranges`: Live ranges of the results of batches: the first batch that needs their rows,
   and the last.
8. `explain`: The text of `Layout.explain`: how each batch reads its operands, and why.
9. `layout`: Layouts: the lane of every node, the row of every value.
"""
