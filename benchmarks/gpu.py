"""Is jedbatch correct on a GPU, and how fast is it, with which variant of its programs?

    python benchmarks/gpu.py                    everything, in parts of less than 8 minutes
    python benchmarks/gpu.py --part throughput  one part: checks, throughput, variants, profile
    python benchmarks/gpu.py --tiny             everything with tiny sizes, on any backend

Every case appends a line to `results.jsonl` as soon as it is measured, and is left out by a later
run, so that a run that was cut off goes on where it was. `report.md` is made of these lines.

checks      tests/program/test_device.py: values and gradients of every model against the loop,
            in float32 with highest precision.
throughput  minibatches, all prepared before and on the device, in turns:
              jedbatch  `apply` with a plan; in training `jax.jit` of value and gradient of it
              unseen    `plan` and `apply` of other minibatches, from Python objects to results
              by hand   hand-written JAX with padding (`by_hand.py`; for the Transformer sentences
                        padded to the longest, `encoder.py`)
              unrolled  straight-line JAX for exactly this minibatch: the batches of jedbatch's
                        schedule one after the other, without padding, and with constant indices
variants    one case with programs made in other ways (see `jedbatch.Target`)
profile     kernels, time that the device is idle between them, and transfers, of one run

Times are medians of a run until its result is there, and of a run among ten that follow each other
without waiting (`streamed`). All sides run with the options that jedbatch compiles with; XLA's
search for the fastest product kernel is off but for the variant `autotuned`, since it compiles
dozens of kernels for every shape, and unrolled programs have hundreds of shapes.
"""

import argparse
import dataclasses
import faulthandler
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from the source tree, installed or not

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jedbatch  # noqa: E402
from benchmarks import common, edbatch  # noqa: E402
from benchmarks.questions import padding  # noqa: E402
from benchmarks.rivals import by_hand, encoder  # noqa: E402
from jedbatch._program.lower import space_begins, value_rows  # noqa: E402

GPU = jedbatch.Target.named("gpu")
PARTS = ("checks", "throughput", "variants", "profile")
MODES = ("inference", "training")
PRECISIONS = {"f32": "highest", "tf32": "tensorfloat32", "bf16": "default"}
NO_SEARCH = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
STREAM = 10  # runs that follow each other without waiting
UNROLLED_AT_MOST = 400  # batches; longer programs take minutes to compile


def variant(name: str, **changes: Any) -> jedbatch.Target:
    """The target for GPUs with something changed."""
    return dataclasses.replace(GPU, name=name, **changes)


def with_widths(name: str, widths: tuple[int, ...]) -> jedbatch.Target:
    """The target for GPUs with other widths of chunks."""
    return variant(name, heavy=widths, light=widths)


WITHOUT_CONDITIONAL = tuple(x for x in GPU.command_buffers if x != "CONDITIONAL")
VARIANTS: dict[str, jedbatch.Target] = {
    "gpu": GPU,
    "host loops": variant("host loops", command_buffers=()),
    "no conditional graphs": variant("no conditional graphs", command_buffers=WITHOUT_CONDITIONAL),
    "no superinstructions": variant("no superinstructions", superinstruction=1),
    "superinstructions of 4": variant("superinstructions of 4", superinstruction=4),
    "loops for a switch": variant("loops for a switch", control="loops", superinstruction=1),
    "as on a CPU": dataclasses.replace(
        jedbatch.Target.named("cpu"), name="as on a CPU", command_buffers=GPU.command_buffers
    ),
    "widths × 2": with_widths("widths × 2", (128, 256, 512, 1024, 2048)),
    "widths × 8": with_widths("widths × 8", (32, 256, 2048)),
    "wide only": with_widths("wide only", (512, 4096)),
    "start 5e8": variant("start 5e8", chunk_work=5e8),
    "start 8e9": variant("start 8e9", chunk_work=8e9),
    "rows in loops": variant("rows in loops", straight_rows=0),
    "projections": variant("projections", projection_bytes=1 << 17),
    "autotuned": variant("autotuned"),
}
OF_ROWS = ("gpu", "rows in loops", "host loops", "autotuned")  # variants for Transformers
OF_CELLS = tuple(v for v in VARIANTS if v != "rows in loops")


class Case(NamedTuple):
    """The settings of one measurement."""

    part: str
    workload: str
    batch: int
    hidden: int
    precision: str
    mode: str
    variant: str = "gpu"

    def __str__(self) -> str:
        return " ".join(map(str, self))


def cases(part: str, tiny: bool) -> list[Case]:
    """The cases of a part, those that matter most first."""
    if part == "checks":
        return [Case("checks", "models", 0, 0, "f32", "training")]
    if tiny:
        found = list(_grid(part, ["treelstm", "transformer"], [(4, 32)], ["f32"]))
        several = [found[0]._replace(variant=v) for v in OF_CELLS[1:]]
        several.append(found[1]._replace(variant="rows in loops"))
        return found + (several if part == "variants" else [])
    trees, others = ["treelstm"], ["bilstm", "lattice_lstm"]
    if part == "throughput":
        chosen = [
            *_grid(part, trees, [(256, 512)], ["f32", "tf32"], ["inference"]),
            *_grid(part, others, [(256, 512)], ["tf32"], ["inference"]),
            *_grid(part, ["transformer"], [(64, 512)], ["tf32"]),
            *_grid(part, trees, [(256, 512)], ["f32", "tf32"], ["training"]),
            *_grid(part, others, [(64, 256)], ["f32"], ["inference"]),
            *_grid(part, others, [(256, 512)], ["tf32"], ["training"]),
            *_grid(part, trees, [(64, 256), (1024, 512)], ["tf32"]),
            *_grid(part, ["nmt"], [(64, 256), (256, 512)], ["tf32"]),
            *_grid(part, ["transformer"], [(64, 256), (256, 512)], ["tf32", "bf16"]),
            *_grid(part, trees, [(256, 512), (256, 1024)], ["bf16"]),
            *_grid(part, [*trees, *others], [(1024, 256)], ["tf32"]),
        ]
        return list(dict.fromkeys(chosen))
    if part == "variants":
        rows = [Case(part, "transformer", 64, 512, "tf32", m, v) for v in OF_ROWS for m in MODES]
        one = [Case(part, "treelstm", 256, 512, "tf32", "inference", v) for v in OF_CELLS]
        two = [Case(part, "bilstm", 256, 512, "tf32", "inference", v) for v in OF_CELLS]
        three = [Case(part, "lattice_lstm", 64, 256, "tf32", "inference", v) for v in OF_CELLS]
        return rows[:4] + one + rows[4:] + two + three
    several = _grid(part, [*trees, *others, "transformer"], [(256, 512)], ["tf32"])
    return [*several, *_grid(part, ["transformer"], [(64, 512)], ["tf32"], MODES)]


def _grid(
    part: str,
    workloads: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    precisions: Sequence[str],
    modes: Sequence[str] = (),
) -> Iterator[Case]:
    modes = modes or (MODES if part == "throughput" else MODES[:1])
    for precision, name, size, mode in itertools.product(precisions, workloads, sizes, modes):
        yield Case(part, name, *size, precision, mode)


# --- one case ---


@dataclasses.dataclass(eq=False)
class Bench:
    """A model with its minibatches; the typical one is first, and all are compared on it.

    Attributes:
      loss: of (params, instance).
      rival: maps a minibatch to (loss of (params, arrays), arrays).
    """

    case: Case
    loss: Callable[[Any, Any], jax.Array]
    params: Any
    minibatches: list[list[Any]]
    rival: Callable[[list[Any]], tuple[Callable[[Any, Any], jax.Array], Any]]

    @classmethod
    def of(cls, case: Case) -> "Bench":
        """The bench of a case, on instances that are made up."""
        count = 4 * case.batch
        if case.workload == "transformer":
            sentences = padding.load(None, count, 0)
            params = encoder.parameters(case.hidden, 1 if case.batch < 16 else 4)
            size = padding.rows
            loss, rival = encoder.loss, _padded
            instances = sentences
        else:
            workload = edbatch.WORKLOADS[case.workload]
            instances, sizes = workload.load(None, count)
            params = workload.parameters(sizes, case.hidden)
            size = functools.partial(workload.flop, h=case.hidden)
            loss, rival = workload.loss, functools.partial(_by_hand, case.workload)
        found = sorted(common.chunks(instances, case.batch), key=size)
        found.insert(0, found.pop(len(found) // 2))
        if case.precision == "bf16":
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return cls(case, loss, jax.device_put(params), found, rival)

    @functools.cached_property
    def target(self) -> jedbatch.Target:
        """The target that programs are compiled for."""
        return VARIANTS[self.case.variant]

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """With which all sides are compiled."""
        if jax.default_backend() == "cpu":
            return {}
        search = {} if self.case.variant == "autotuned" else NO_SEARCH
        return search | self.target.compiler_options()

    @functools.cached_property
    def batched(self) -> jedbatch.Batched:
        """The model of many instances, which has met all minibatches but the last."""
        batched = jedbatch.batch(self.loss, target=self.target)
        for minibatch in self.minibatches[1:-1]:
            batched.plan(self.params, minibatch, gradient=self.training)
        return batched

    @property
    def training(self) -> bool:
        """Whether gradients are wanted."""
        return self.case.mode == "training"

    def plan(self, minibatch: list[Any]) -> jedbatch.Plan:
        """The host's half."""
        return self.batched.plan(self.params, minibatch, gradient=self.training)

    def compiled(self, loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
        """A loss of a minibatch, or its value and gradient, compiled."""
        function = jax.value_and_grad(loss) if self.training else loss
        return jax.jit(function, compiler_options=self.options)

    @functools.cached_property
    def apply(self) -> Callable[[Any, jedbatch.Plan], Any]:
        """The device's half."""

        def loss(params: Any, plan: jedbatch.Plan) -> jax.Array:
            return self.batched.apply(params, plan).astype(jnp.float32).sum()

        return self.compiled(loss)

    def sides(self, rivals: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, run) of all that is compared; the first is ours."""
        host_plan = self.plan(self.minibatches[0])
        plan = jax.device_put(host_plan)
        yield "jedbatch", lambda: self.apply(self.params, plan)
        if not rivals:
            return
        loss, arrays = self.rival(self.minibatches[0])
        by_hand_compiled, there = self.compiled(loss), jax.device_put(arrays)
        yield "by hand", lambda: by_hand_compiled(self.params, there)
        if self.case.workload == "transformer" or self.training:
            return
        if len(host_plan.schedule) <= UNROLLED_AT_MOST:
            kept = self.batched.plan(self.params, self.minibatches[0])  # a row for every value
            straight, inputs = self.compiled(unrolled(kept)), jax.device_put(kept.inputs)
            yield "unrolled", lambda: straight(self.params, inputs)


def _padded(minibatch: list[Any]) -> tuple[Callable[[Any, Any], jax.Array], Any]:
    """Sentences padded to the longest of the minibatch."""

    def loss(params: Any, batch: Any) -> jax.Array:
        mean = encoder.padded_loss(params, encoder.Padded(*batch)).astype(jnp.float32)
        return mean * len(minibatch)

    return loss, tuple(encoder.Padded.of(minibatch, padding.longest(minibatch)))


def _by_hand(name: str, minibatch: list[Any]) -> tuple[Callable[[Any, Any], jax.Array], Any]:
    return by_hand.loss(name), by_hand.prepare(name, minibatch)


def unrolled(plan: jedbatch.Plan) -> Callable[[Any, Any], jax.Array]:
    """The loss of a minibatch, batch after batch as planned: straight-line, without padding."""
    placed, signature = plan.host.placed, plan.static.signature
    graph, schedule, layout = placed.graph, placed.schedule, placed.layout
    row = value_rows(placed, space_begins(placed, signature))
    prepare, _ = plan.static.programs.program(signature)
    place = dict(zip(placed.type_ids, placed.kernels, strict=True))

    def loss(params: Any, inputs: Any) -> jax.Array:
        consts = dict(zip(signature.kernels, prepare(jax.tree.leaves(params)), strict=True))
        arenas = []
        for kind, rows in zip(signature.arenas, signature.rows, strict=True):
            given = jnp.asarray(inputs[f"{jnp.dtype(kind[1]).name}[{','.join(map(str, kind[0]))}]"])
            arenas.append(jnp.pad(given, [(0, rows - len(given)), *[(0, 0)] * len(kind[0])]))
        for b, (t, nodes) in enumerate(schedule.batches):
            kernel, first = place[t], int(layout.start[b])
            nodes = np.asarray(nodes)
            nodes = nodes[np.argsort(layout.lane[nodes])]
            position = np.arange(len(kernel.operands))[:, None]
            read = row[graph.operand[graph.operand_ptr[nodes] + position]]
            operands = [
                arenas[signature.arena(kind)][rows]
                for kind, rows in zip(kernel.operands, read, strict=True)
            ]
            run = jax.vmap(kernel.forward, in_axes=(None, 0), axis_size=len(nodes))
            results = run(consts[kernel], operands)
            bases = signature.bases[signature.kernels.index(kernel)]
            for kind, base, made in zip(kernel.results, bases, results, strict=True):
                a = signature.arena(kind)
                arenas[a] = jax.lax.dynamic_update_slice_in_dim(arenas[a], made, base + first, 0)
        total = 0.0
        for kind, outputs in zip(placed.arenas, placed.outputs, strict=True):
            if len(outputs):
                total += arenas[signature.arena_ids[kind]][row[outputs]].sum()
        return total

    return loss


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Returns the measurements of a case."""
    with jax.default_matmul_precision(PRECISIONS[case.precision]):
        bench = Bench.of(case)
        found: dict[str, Any] = {}
        runs: dict[str, Callable[[], Any]] = {}
        losses = {}
        for name, run in bench.sides(case.part == "throughput"):
            start = time.perf_counter()
            try:
                result = jax.block_until_ready(run())
            except Exception as error:
                if not runs:
                    raise
                found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            compile_seconds = time.perf_counter() - start
            losses[name] = float(result[0] if bench.training else result)
            runs[name] = run
            found[name] = {"first call s": round(compile_seconds, 2)}
        for name, loss in losses.items():
            tolerance = 2e-2 if case.precision != "f32" else 1e-4
            np.testing.assert_allclose(loss, losses["jedbatch"], rtol=tolerance, err_msg=name)
        if case.part == "profile":
            return found | {"profile": profile(runs["jedbatch"])}
        times = common.interleaved(list(runs.values()), seconds)
        streams = [functools.partial(streamed, run) for run in runs.values()]
        several = common.interleaved(streams, seconds, least=3)
        for i, name in enumerate(runs):
            found[name] |= {
                "ms": 1e3 * times.median(i),
                "streamed ms": 1e3 * several.median(i) / STREAM,
                "instances/s": case.batch * STREAM / several.median(i),
            }
        if case.part == "throughput":
            found["unseen"] = unseen(bench)
        return found


def streamed(run: Callable[[], Any]) -> Any:
    """Several runs, none of which waits for the one before."""
    return [run() for _ in range(STREAM)]


def unseen(bench: Bench) -> dict[str, Any]:
    """Planning and running the minibatch that has not been met, and a second time."""
    minibatch, before = bench.minibatches[-1], bench.batched.compilations
    start = time.perf_counter()
    plan = bench.plan(minibatch)
    planned = time.perf_counter()
    jax.block_until_ready(bench.apply(bench.params, plan))
    return {
        "plan ms": 1e3 * (planned - start),
        "ms": 1e3 * (time.perf_counter() - start),
        "again ms": 1e3 * common.seconds(lambda: bench.apply(bench.params, bench.plan(minibatch))),
        "compiled": bench.batched.compilations - before,
    }


# --- what the device does ---


def profile(run: Callable[[], Any], repeat: int = 3) -> dict[str, Any]:
    """Kernels, busy and idle time and transfers per run, and the kernels that take longest."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(repeat):
                jax.block_until_ready(run())
        files = sorted(Path(directory).rglob("*.xplane.pb"))
        if not files:
            return {"error": "the profiler wrote nothing"}
        planes = jax.profiler.ProfileData.from_file(str(files[-1])).planes
        return summarized(planes, repeat)


def summarized(planes: Any, repeat: int) -> dict[str, Any]:
    """The figures of `profile`, from the planes of a trace."""
    events, host = [], {}
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                    events.append((event.start_ns, event.duration_ns, event.name))
                elif "Launch" in event.name or "Synchronize" in event.name:
                    count, total = host.get(event.name, (0, 0.0))
                    host[event.name] = count + 1, total + event.duration_ns
    events.sort()
    busy, end, gaps = 0.0, None, []
    kernels: dict[str, tuple[int, float]] = {}
    for start, duration, name in events:
        count, total = kernels.get(name, (0, 0.0))
        kernels[name] = count + 1, total + duration
        if end is not None and start > end:
            gaps.append(start - end)
        busy += max(0.0, start + duration - max(start, end or start))
        end = max(end or 0, start + duration)
    copies = {n: c for n, c in kernels.items() if "memcpy" in n.lower() or "memset" in n.lower()}
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:12]
    return {
        "kernels per run": len(events) / repeat,
        "busy ms per run": busy / 1e6 / repeat,
        "idle ms per run": sum(g for g in gaps if g < 1e6) / 1e6 / repeat,
        "median gap µs": float(np.median(gaps)) / 1e3 if gaps else 0.0,
        "copies per run": {n: c / repeat for n, (c, _) in copies.items()},
        "host per run": {n: [c / repeat, t / 1e6 / repeat] for n, (c, t) in host.items()},
        "longest": [[n[:80], c / repeat, t / 1e6 / repeat] for n, (c, t) in longest],
    }


def checks(tiny: bool) -> dict[str, Any]:
    """Runs the tests marked `device`, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "device"]
    command += ["-o", "addopts=--strict-markers --import-mode=importlib"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_benchmark"):  # warns where tests run side by side
        command += ["-p", "no:benchmark"]
    command += ["-k", "treelstm-"] if tiny else []
    command += [str(ROOT / "tests" / "program" / "test_device.py")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu" if jax.default_backend() == "cpu" else "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    tail = lines[-1] if lines else done.stderr[-300:]
    return {"exit": done.returncode, "summary": tail, "failed": failed, "tail": lines[-60:]}


# --- the run ---


class Results:
    """The measurements made so far: lines of a file that later runs read."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["case"]] = row

    def add(self, case: Case, found: dict[str, Any]) -> None:
        """Keeps what was found of a case."""
        row = {"case": str(case), **case._asdict(), "found": found}
        self.rows[str(case)] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def run_part(part: str, results: Results, args: argparse.Namespace) -> None:
    """Measures the cases of a part that have not been measured, as far as time allows."""
    end = time.monotonic() + 60 * args.minutes
    for case in cases(part, args.tiny):
        if args.only not in str(case) or str(case) in results.rows:
            continue
        if time.monotonic() > end:
            print(f"{part}: {args.minutes} minutes are over; run it again to go on")
            return
        faulthandler.dump_traceback_later(args.patience, exit=True, file=sys.__stderr__)
        start = time.monotonic()
        try:
            found = checks(args.tiny) if part == "checks" else measure(case, args.seconds)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        faulthandler.cancel_dump_traceback_later()
        results.add(case, found | {"took s": round(time.monotonic() - start, 1)})
        print(f"{case}: {summary(found)} [{time.monotonic() - start:.0f} s]", flush=True)
        jax.clear_caches()


def summary(found: dict[str, Any]) -> str:
    """A case in a line."""
    if "error" in found:
        return found["error"][:200]
    if "summary" in found:
        return found["summary"]
    if "profile" in found:
        return json.dumps(found["profile"])[:300]
    parts = []
    for name, side in found.items():
        if isinstance(side, dict) and "streamed ms" in side:
            parts.append(f"{name} {side['ms']:.2f} ms, streamed {side['streamed ms']:.2f}")
    return "; ".join(parts)


def ratio(found: dict[str, Any], name: str) -> str:
    """Returns the streamed time of a side over that of jedbatch."""
    if "streamed ms" not in found.get(name, {}):
        return "–"
    return f"{found[name]['streamed ms'] / found['jedbatch']['streamed ms']:.2f}"


def report(results: Results) -> str:
    """A page of what has been measured."""
    lines = [f"{common.machine()}", ""]
    rows = list(results.rows.values())
    for row in rows:
        if row["part"] == "checks":
            lines += [f"checks: {row['found'].get('summary', row['found'])}", ""]
    header = "workload batch hidden precision mode variant instances/s ms streamed_ms"
    header += " by_hand_× unrolled_× unseen_ms compile_s"
    lines += [f"| {' | '.join(header.replace('_', ' ') for header in header.split())} |"]
    lines += [f"|{'---|' * len(header.split())}"]
    for row in rows:
        found = row["found"]
        if row["part"] not in ("throughput", "variants"):
            continue
        ours = found.get("jedbatch", {})
        cells = [str(row[key]) for key in Case._fields[1:]]
        if "ms" not in ours:
            error = " ".join(found.get("error", "failed").split())[:200]
            lines.append(f"| {' | '.join(cells)} | {error} |")
            continue
        cells += [f"{ours['instances/s']:.0f}", f"{ours['ms']:.2f}", f"{ours['streamed ms']:.2f}"]
        cells += [ratio(found, "by hand"), ratio(found, "unrolled")]
        cells += [f"{found['unseen']['again ms']:.1f}" if "unseen" in found else "–"]
        cells += [f"{ours['first call s']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        profiled = dict(row["found"].get("profile", ()))
        longest = profiled.pop("longest", ())
        if profiled:
            lines += ["", f"{row['case']}:"]
            lines += [f"- {name}: {value}" for name, value in profiled.items()]
            lines += [f"  - {name}: {n:.0f} × in {ms:.3f} ms" for name, n, ms in longest]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="by default all, one after the other")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="per timing (%(default)s)")
    parser.add_argument("--minutes", type=float, default=7, help="per part (%(default)s)")
    parser.add_argument("--patience", type=float, default=150, help="seconds a case may take")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.seconds = 0.02
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "results.jsonl")
    print(common.machine(), flush=True)
    for part in [args.part] if args.part else PARTS:
        run_part(part, results, args)
        (args.out / "report.md").write_text(report(results))


if __name__ == "__main__":
    main()
