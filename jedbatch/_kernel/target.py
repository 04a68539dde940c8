"""The targets of compilation: constants that differ between kinds of devices, in one place.

A CPU starts an operation in no time and pays for every row; a GPU takes some 20 µs to start the
kernels of a chunk, as long as it takes for some hundred rows, and a loop whose trip count only the
device knows costs it more than the rows of a small batch. So a target says how wide chunks are,
what starting one costs, and how a program finds its next instruction:

    loops     a loop for every opcode, of which all but one make no trip. XLA:CPU copies an arena
              that passes through the result of a conditional; it never copies one in a loop.
    switch    one branch for every opcode, with runs of frequent opcodes put together into
              superinstructions (see `_program.instructions`). XLA:GPU runs such a program from CUDA
              graphs without asking the host, provided that command buffers are enabled for `while`.

XLA asks LLVM for its highest level of optimization, which unrolls more of the loops over the
elements of a row. On CPUs that takes long and makes nothing faster, so programs are compiled at the
level below (`benchmarks/questions/llvm.py` compares them).

The figures of "gpu" were chosen by runs on an H100; `benchmarks/gpu.py` measures them again, and
what it compares them with. Those for lanes whose loops or branches values decide on are of an H200:

    diverging   Chunks run one after the other, each as long as its longest loop: 4,096 chains of
                Hamiltonian Monte Carlo in four chunks took 2.2 times as long as under `vmap`, which
                has one, and 256 equal ones in two 1.9 times. So starting a chunk costs as many
                lanes as the widest has.
    step_work   With products in float32 loops of 256 units are faster in lock step (4,096 of them
                11.3 ms, by lanes 15.8), loops of 1,024 units by lanes (1,024 of them 14.0 ms, in
                lock step 22.8; 8,192 of log-normal lengths 42 and 244). Anything from 2.1e8 to 8e8
                separates them. In JAX's default precision 256 units gain by lanes, too (5.4 and
                4.1 ms), which is given up here.
    nest_work   4,096 such chains do 4.9e8 operations in their largest block, and ran 4.9 times as
                fast by lanes; 256 do 3.1e7, and ran as fast, or a fifth as fast where all draws
                are alike. Half of `step_work` lies between.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from jedbatch import checks
from jedbatch._jaxpr.program_counters import BRANCH_LANES, NEST_WORK, STEP_WORK, LaneRule
from jedbatch._layout.bucketing import (
    COARSE_BUCKETS,
    DIVERGING_BUCKETS,
    FINE_BUCKETS,
    Buckets,
)
from jedbatch._support.types import TargetName

BLOCK_BUCKETS = Buckets((16, 192), 16)
FORWARD_BUCKETS = Buckets((16, 192, 224, 256), 32)
LEAST_START = 8  # what starting a chunk costs at least, in lanes
NARROWEST_BLOCK = 8  # each block reads and writes a whole gradient
GPU_BLOCKS = Buckets((512, 2048), 512)
BLOCK_ROWS = 512  # up to which lanes that multiply several rows by each weight are put together
HEAVY_BLOCKS = Buckets((64, 256))  # products of 512 rows take longer where matrices are large
LIGHT_BLOCKS = Buckets((64,))  # a second width makes nothing faster and would be compiled, too

# What XLA:GPU puts into command buffers: what JAX 0.11 has it do by default, and loops.
COMMAND_BUFFERS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUSTOM_CALL",
    "CUDNN",
    "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL",
    "WHILE",
)


@dataclass(frozen=True)
class Target:
    """A kind of device, as far as programs made for it differ.

    Attributes:
      name: "cpu", "gpu", or a name for a variant.
      heavy, light: widths of the chunks of lanes that do much, and of those that do little.
      chunk_work: floating-point operations done while a chunk is started.
      longest_start: what starting a chunk may cost, in lanes, to tell light lanes from heavy ones.
      heavy_start: above so many lanes a lane counts as light.
      light_start: what starting a chunk of light lanes costs at most, in lanes.
      chunk_bytes: bytes that a chunk may read and write.
      light_bytes: the same for the widest chunks of lanes that do little, which are made narrower:
        a share of the cache of a core, as their operations hand on values through it; 0 for
        `chunk_bytes`.
      step_work: floating-point operations done while a step of lanes is started whose loops or
        branches values decide on.
      branch_lanes: how many lanes of a branch run together, where values decide on branches.
      nest_work: what all of them do in one block of loops in loops, as a multiple of `step_work`,
        from which on these do not run in lock step.
      diverging: widths of the chunks of lanes whose loops or branches values decide on.
      sums: widths of the chunks in which cotangents of values with many readers are summed up.
      blocks: of ragged rows.
      forward_blocks: the same where no gradient is planned: more widths, as each is compiled once
        and not for the reverse, too.
      heavy_blocks, light_blocks: of lanes whose weight gradients are computed together.
      rows_together: padded rows of the ragged instances that run at the same time.
      together: no more of the ragged instances than one in so many run at the same time.
      table_size: numbers in a table of the instances that run at the same time, where loops go over
        tables; fewer fit into the cache, and each loop is as long as the longest of them. 0 if only
        rows are counted.
      shortest: the least room for the rows of a ragged instance.
      straight_rows: packed rows up to which ragged regions run without loops (see
        `_ragged.groups`), and lanes up to which weight gradients are computed together.
      straight_indexed_rows: the same for regions that read or write rows by index, such as those of
        graphs, which take all rows at once there in any case.
      straight_bytes: bytes of packed rows, of all values that phases hand on, up to which those run
        without loops; 0 where `straight_indexed_rows` says so.
      microbatch_rows: above so many rows, regions without loops run a few calls at a time, which
        together have up to about so many (see `_ragged.microbatches`); 0 for all calls at once.
      rest_work: floating-point operations that an instance may do besides its ragged parts for all
        to be one program, without loops over instructions, where all instances do the same (see
        `_ragged.regions`); 0 if none may.
      projection_bytes: of the weights of a product of inputs that is worth a node of its own (see
        `_record.passes.projections`); 0 if none is.
      summed_last: whether products of matrices of a lane sum over the last axes of their first
        factors (see `_kernel.factors`).
      called_work: multiplications of a product of the rows of a chunk and a matrix up to which the
        compiled core computes it (see `_kernel.rows_times_matrix`); 0 if it never does.
      control: how the next instruction is found, "loops" or "switch".
      superinstruction: opcodes in a superinstruction at most; 1 for none.
      command_buffers: what XLA:GPU puts into CUDA graphs; empty for what it does by default.
      optimization_level: how hard LLVM optimizes, from 0 to 3; None for what XLA does by default.
    """

    name: str
    heavy: tuple[int, ...] = FINE_BUCKETS.widths
    light: tuple[int, ...] = COARSE_BUCKETS.widths
    chunk_work: float = 9e5
    longest_start: int = 64
    heavy_start: int = 16
    light_start: int = 16
    chunk_bytes: int = 16 << 20
    light_bytes: int = 1 << 19
    step_work: float = STEP_WORK
    branch_lanes: int = BRANCH_LANES
    nest_work: float = NEST_WORK
    diverging: Buckets = DIVERGING_BUCKETS
    sums: Buckets = COARSE_BUCKETS
    blocks: Buckets = BLOCK_BUCKETS
    forward_blocks: Buckets = FORWARD_BUCKETS
    heavy_blocks: Buckets = HEAVY_BLOCKS
    light_blocks: Buckets = LIGHT_BLOCKS
    rows_together: int = 256
    together: int = 4
    table_size: int = 1 << 15
    shortest: int = 8
    straight_rows: int = 0
    straight_indexed_rows: int = 1 << 17
    straight_bytes: int = 0
    microbatch_rows: int = 4096
    rest_work: float = 0
    projection_bytes: int = 1 << 17
    summed_last: bool = True
    called_work: int = 1 << 22
    control: str = "loops"
    superinstruction: int = 1
    command_buffers: tuple[str, ...] = ()
    optimization_level: int | None = 2

    @staticmethod
    def named(name: TargetName) -> "Target":
        """The target for "cpu" or "gpu".

        Args:
          name: "cpu" or "gpu".

        Returns:
          The target.

        Raises:
          TypeError: it is no string.
          ValueError: there is no such target.
        """
        found = checked_target(name, "`Target.named`")
        if found is None:
            raise TypeError(f"`Target.named` got None; expected one of {sorted(TARGETS)}.")
        return found

    def buckets(self, work: int, row_bytes: int) -> Buckets:
        """The widths for a lane of so many floating-point operations and bytes of rows.

        Light lanes are padded generously and compiled in few widths; heavy ones are not. Of long
        rows, such as matrices, only the widths that fit into `chunk_bytes` are left, but two at
        least, and the widest of light lanes is halved until it fits into `light_bytes`.

        Args:
          work: floating-point operations of a lane.
          row_bytes: bytes that a lane reads and writes.

        Returns:
          The widths of chunks, in lanes.
        """
        return _buckets_of(self, work, row_bytes)

    def weight_blocks(self, work: int, row_bytes: int, rows: float = 1) -> Buckets:
        """The blocks in which weight gradients of such lanes are computed, see `buckets`.

        Args:
          work: floating-point operations of a lane.
          row_bytes: bytes that a lane reads and writes.
          rows: that a lane multiplies by each weight, on average. Where they are many, such as the
            elements of a list, blocks have fewer lanes.

        Returns:
          The widths of blocks, in lanes.
        """
        blocks = self.light_blocks if self._start(work) > LEAST_START else self.heavy_blocks
        fitting = [w for w in blocks.widths if w * row_bytes <= self.chunk_bytes]
        rows *= blocks.widths[-1] / max(blocks.widths[-1], BLOCK_ROWS)
        parts = 1 << max(0, int(math.log2(max(1, rows))))
        widths = dict.fromkeys(
            max(NARROWEST_BLOCK, w // parts) for w in fitting or [NARROWEST_BLOCK]
        )
        return Buckets(tuple(widths), blocks.overhead)

    def start_work(self, work: int) -> float:
        """The cost of starting a chunk, as `chunk_work`; some lanes' work where lanes do much.

        Args:
          work: floating-point operations of a lane.

        Returns:
          Floating-point operations that take as long.
        """
        return max(self.chunk_work, LEAST_START * work)

    def _start(self, work: int) -> int:
        """The cost of starting a chunk, in lanes of so many floating-point operations."""
        start = LEAST_START
        while start < self.longest_start and start * work < self.chunk_work:
            start *= 2
        return start

    def for_rows(self, keeps: bool) -> "Target":
        """The target for ragged rows.

        Args:
          keeps: whether what the reverse would read is kept.

        Returns:
          A target whose `blocks` are those to use.
        """
        return self if keeps else _without_reverse(self)

    @property
    def has_slice_bodies(self) -> bool:
        """Whether a kernel may have a second body, which reads operands as slices.

        XLA starts a slice faster than a gather. What reads rows on a CPU finds the slices itself.
        """
        return self.control == "switch"

    def compiler_options(self) -> dict[str, str]:
        """Options of `jax.jit` that programs for this target should be compiled with.

        Returns:
          Options of XLA by name. How hard LLVM optimizes is left to JAX where
          `jax_disable_most_optimizations` is set.
        """
        options = {}
        if self.command_buffers:
            options["xla_gpu_enable_command_buffer"] = ",".join(self.command_buffers)
        if self.optimization_level is not None and not _optimizes_little():
            options["xla_backend_optimization_level"] = str(self.optimization_level)
        return options


def _optimizes_little() -> bool:
    """Returns whether programs are to be compiled soon, however long they run then."""
    return bool(jax.config.read("jax_disable_most_optimizations"))


@functools.cache
def _without_reverse(target: Target) -> Target:
    return replace(target, blocks=target.forward_blocks)


@functools.cache
def _buckets_of(target: Target, work: int, row_bytes: int) -> Buckets:
    start = target._start(work)
    is_light = start > target.heavy_start
    widths = target.light if is_light else target.heavy
    if is_light and target.light_bytes and len(widths) > 2:
        *narrower, widest = widths
        while widest > narrower[-1] and widest * row_bytes > target.light_bytes:
            widest //= 2
        widths = (*narrower, widest) if widest > narrower[-1] else tuple(narrower)
    fitting = sum(width * row_bytes <= target.chunk_bytes for width in widths)
    return Buckets(widths[: max(2, fitting)], min(start, target.light_start) if is_light else start)


def lane_rule(target: Target) -> LaneRule:
    """Returns how lanes run whose loops or branches values decide on."""
    return LaneRule(
        step_work=target.step_work,
        branch_lanes=target.branch_lanes,
        nest_work=target.nest_work,
        nests=target.control == "loops",
    )


CPU = Target("cpu")
GPU = Target(
    "gpu",
    heavy=(32, 128, 256, 512, 2048),
    light=(32, 128, 512, 2048, 8192),
    chunk_work=2e9,
    longest_start=8192,
    heavy_start=512,
    light_start=8192,
    chunk_bytes=1 << 30,
    light_bytes=0,
    step_work=4e8,
    branch_lanes=256,
    nest_work=0.5,
    diverging=Buckets((256, 1024, 4096, 8192), 8192),
    sums=Buckets((256, 2048), 1024),
    blocks=GPU_BLOCKS,
    forward_blocks=GPU_BLOCKS,
    heavy_blocks=GPU_BLOCKS,
    light_blocks=GPU_BLOCKS,
    rows_together=8192,
    together=1,
    table_size=0,
    shortest=32,
    straight_rows=1 << 16,
    straight_bytes=4 << 30,
    microbatch_rows=0,
    rest_work=3e7,
    projection_bytes=0,
    summed_last=False,
    called_work=0,
    control="switch",
    superinstruction=8,
    command_buffers=COMMAND_BUFFERS,
    optimization_level=None,
)
TARGETS = {"cpu": CPU, "gpu": GPU}


def checked_target(target: str | Target | None, name: str) -> Target | None:
    """The target that an option of `name` asks for; None for that of the device.

    Raises:
      TypeError, ValueError: there is no such target.
    """
    if target is None or isinstance(target, Target):
        return target
    if not isinstance(target, str):
        raise TypeError(
            f"{name} got target={checks.shown(target)}; expected one of "
            f"{sorted(TARGETS)}, a `jedbatch.Target`, or None for the device that JAX uses."
        )
    if target not in TARGETS:
        raise ValueError(
            f"{name} got target={checks.brief(target)}; expected one of {sorted(TARGETS)}, or None "
            "for the device that JAX uses. A variant is made by "
            "`dataclasses.replace(jedbatch.Target.named('gpu'), ...)`."
        )
    return TARGETS[target]


def target_of(values: Iterable[object]) -> Target:
    """The target of the device that some values are bound to, or else of JAX's default device."""
    for x in values:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
            bound: Any = next(iter(x.sharding.device_set))
            return target_of_platform(bound.platform)
    config: Any = jax.config  # its options are not typed
    device = config.jax_default_device
    if device is None:
        return target_of_platform(jax.default_backend())
    return target_of_platform(getattr(device, "platform", device))


def target_of_platform(platform: str) -> Target:
    """Returns the target for a platform: `GPU` for GPUs, `CPU` for all others."""
    return GPU if platform in ("gpu", "cuda", "rocm") else CPU


def compiler_options(target: TargetName | Target | None = None) -> dict[str, str]:
    """Options for a `jax.jit` around batched functions, such as that of a train step.

    A batched function that is called by itself is compiled with them. XLA takes the options of a
    program from the outermost `jax.jit`, so inside of one of yours you must pass them on. Without
    them nothing goes wrong, but on a GPU every loop asks the host whether to go on, and on a CPU
    programs take longer to compile. JAX refuses options of a `jax.jit` that runs inside of another
    one or of a loop, or that is differentiated from outside.

    Args:
      target: "cpu", "gpu", a `jedbatch.Target`, or None for JAX's default device.

    Returns:
      Options as `jax.jit(..., compiler_options=...)` takes them.

    Examples:
      >>> import jax, jedbatch
      >>> step = jax.jit(lambda x: 2 * x, compiler_options=jedbatch.compiler_options())
      >>> float(step(3.0))
      6.0
    """
    made_for = checked_target(target, "`compiler_options`") or target_of(())
    return made_for.compiler_options()
