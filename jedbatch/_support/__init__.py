"""Additions to Python's library: knows neither graphs nor JAX.

Files that are written whole, caches that forget, state that is put back after an interrupt,
recordings that are done again, marks of frames, progress bars, and pictures as SVG.

Read in this order:

1. `frames`: The owners of frames: modules of this package know each other by marks, not by their
   names.
2. `caches`: Dictionaries that forget: every cache has a bound, in entries or in bytes.
3. `restored`: Putting things back, whatever interrupts it.
4. `guards`: Recording again where an assumption of the recording turns out to be wrong.
5. `files`: Files that are written whole or not at all.
6. `progress`: Progress bars, by tqdm where it is installed.
7. `canvas`: Pictures as SVG, from nothing but rectangles, circles, lines and text.
8. `state_diagram`: Drawing a state machine as SVG, from nothing but boxes and arrows.
"""
