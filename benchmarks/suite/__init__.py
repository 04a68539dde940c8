"""Benchmarks run by pytest-benchmark: throughput, latency, batches, cells, models.

Read in this order:

1. `harness`: Cases of the suite, and how one is measured.
2. `bench_throughput`, `bench_latency`, `bench_batches`, `bench_cells` (of the cells in `cells`) and
   `bench_models`: one question each.
3. `conftest`: The options of the command line.
4. `report`: Writes tables and plots of what was measured; published figures are in `figures`.
"""
