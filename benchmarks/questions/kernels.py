"""How many kernels does a program start on a GPU? Counted without one.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python benchmarks/questions/kernels.py "transformer 64 512 tf32 inference"

The plug-in is that of the version of JAX; no drivers are needed.

XLA compiles for the device that a text describes (an H100 here, see `TARGET`), so that what it
fuses, copies and puts into loops can be read where there is no such device. A line for every loop
and branch says what is compiled into it; how often it runs is data. Kernels of the rival that
`gpu.py` calls "by hand" stand below those of jedbatch, for the same minibatch.
"""

import argparse
import collections
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

CUDA_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
NOT_STARTED = {  # by the device
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "opt-barrier"),
    *("after-all", "partition-id", "while", "conditional", "call", "async-start", "async-done"),
}
PRODUCT = re.compile("matmul|gemm")
Instruction = tuple[str, str]  # (opcode, line)


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """(the instructions of every computation by name, the name of the first that runs)."""
    found: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name and " = " in line:
            opcode = re.search(r"[\])}] ([a-z][\w\-]*)\(", line)
            found[name].append((opcode[1] if opcode else "", line))
    return found, entry


def inner(opcode: str, line: str) -> Iterator[str]:
    """The computations that an instruction runs, other than as one kernel."""
    if opcode == "conditional":
        listed = re.search(r"branch_computations=\{(.*?)\}", line)
        pair = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
        yield from (x.strip().lstrip("%") for x in listed[1].split(",")) if listed else pair
    attribute = {"while": "body", "call": "to_apply", "async-start": "calls"}.get(opcode)
    if attribute and (called := re.search(rf"{attribute}=%?([\w.\-]+)", line)):
        yield called[1]


def summary(text: str) -> list[str]:
    """Returns the kernels of a program, of every loop and branch of it, and their sum."""
    found, entry = computations(text)
    lines: list[str] = []
    total: collections.Counter[str] = collections.Counter()

    def visit(name: str, label: str, depth: int) -> None:
        kernels = collections.Counter(
            "product" if opcode == "custom-call" and PRODUCT.search(line) else opcode
            for opcode, line in found[name]
            if opcode not in NOT_STARTED and opcode
        )
        total.update(kernels)
        counted = ", ".join(f"{n} {k}" for k, n in sorted(kernels.items()))
        lines.append(f"{'  ' * depth}{label}: {sum(kernels.values())} ({counted})")
        for opcode, line in found[name]:
            if opcode in ("while", "conditional"):
                total[opcode] += 1
            for called in inner(opcode, line):
                visit(called, opcode, depth + 1)

    visit(entry, "program", 0)
    return [*lines, "all: " + ", ".join(f"{n} {k}" for k, n in sorted(total.items()))]


def compiled(function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> str:
    """The program that XLA makes of a function for the device of `TARGET`."""
    import jax
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    where = jax.sharding.SingleDeviceSharding(found.devices[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), x.dtype, sharding=where), arguments
    )
    made = jax.jit(function, compiler_options=CUDA_OPTIONS | options).lower(*shapes).compile()
    return made.as_text() or ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", help='as in "transformer 64 512 tf32 training", see `gpu.py`')
    parser.add_argument("--variant", default="gpu", help="of `gpu.py` (%(default)s)")
    args = parser.parse_args()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there are no drivers to ask
    import jax

    from benchmarks import gpu  # after the environment is set

    workload, batch, hidden, precision, mode = args.case.split()
    case = gpu.Case("kernels", workload, int(batch), int(hidden), precision, mode, args.variant)
    with jax.default_matmul_precision(gpu.PRECISIONS[precision]):
        bench = gpu.Bench.of(case)
        plan = bench.plan(bench.minibatches[0])
        loss, arrays = bench.rival(bench.minibatches[0])

        def ours(params: Any, plan: Any) -> Any:
            return bench.batched.apply(params, plan).sum()

        for name, function, given in (("jedbatch", ours, plan), ("by hand", loss, arrays)):
            wanted = jax.value_and_grad(function) if bench.training else function
            text = compiled(wanted, (bench.params, given), bench.target.compiler_options())
            print(name, *summary(text), sep="\n", flush=True)


if __name__ == "__main__":
    main()
