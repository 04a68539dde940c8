"""How fast jedbatch is, and how fast others are: see `README.md`.

- `suite`: the workloads over sizes of minibatches and of states, in turns with the rivals.
- `questions`: scripts that answer one question each.
- `rivals`: the same computations as an expert writes them, and PyTorch.
- `results`: what was measured, as CSV files with the command, the machine and the commit.

`edbatch` has the workloads of ED-Batch's released code, `common` what scripts share, `gpu` is all
that needs an accelerator, and `plot` writes the summary of `README.md`.
"""
