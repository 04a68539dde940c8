"""Additions to Python's library: knows neither graphs nor JAX.

Files that are written whole, caches that forget, state that is put back after an interrupt,
recordings that are done again, marks of frames, progress bars, lines in the log, pictures as SVG,
and the compiled core, whose sources are in `c`.

Read in this order:

1. `types`: Names of types that annotations need and Python cannot express.
2. `frames`: The owners of frames: modules of this package know each other by marks, not by their
   names.
3. `samples`: Cutting a sample of instances into minibatches.
4. `caches`: Dictionaries that forget: every cache has a bound, in entries or in bytes.
5. `restored`: Putting things back, whatever interrupts it.
6. `guards`: Recording again where an assumption of the recording turns out to be wrong.
7. `files`: Files that are written whole or not at all.
8. `progress`: Progress bars, by tqdm where it is installed.
9. `announce`: A line in the log while something takes long, such as compiling a program.
10. `native`: The compiled core: twins in C of the functions in which planning spends most of its
   time.
11. `canvas`: Pictures as SVG, from nothing but rectangles, circles, lines and text.
12. `state_diagram`: Drawing a state machine as SVG, from nothing but boxes and arrows.
"""
