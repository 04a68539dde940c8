"""Pictures of plans; `jedbatch.viz` is their public face.

Read in this order:

1. `styles`: Node types in pictures: their names and colours, and a lane for each of them.
2. `graph`: Drawing instance graphs: every node where there is room, and how many where there is
   not.
3. `batches`: Drawing schedules: which nodes run together, and when.
4. `memory`: Drawing memory: the results in each row, from when until when, and how they are read.
"""
