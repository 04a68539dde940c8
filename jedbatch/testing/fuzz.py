"""Many random programs against the loop, for hours if need be; see `strategies` for a few.

A program has a number, and depends on that and a seed alone: what fails can be run again, and a
long run can be cut into parts, for several processes or for another day. Nearly all of the time
goes into compiling; XLA compiles twice as fast with `XLA_FLAGS=--xla_backend_optimization_level=0`.
"""

import multiprocessing
import re
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import jax

from jedbatch.testing.cases import Case, UnclearError
from jedbatch.testing.strategies import cases, hypothesis

FORGET = 100  # programs after which JAX forgets what it has compiled
PART = 50  # programs that a process runs at a time
PARTS = 4  # that a process runs before another one starts
TELL = 20  # programs between two lines of progress
SHRINK = 120.0  # seconds spent on making a failure small, by default


@dataclass
class Failure:
    """One way to fail.

    Attributes:
      case: the smallest program found that does.
      text: the error and where it came from.
      numbers: of the programs that failed like this.
    """

    case: Case
    text: str
    numbers: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of programs that failed like this."""
        return len(self.numbers)

    def propose(self, case: Case, text: str) -> None:
        """Keeps another program that fails like this if it is smaller."""
        if len(str(case)) <= len(str(self.case)):
            self.case, self.text = case, text

    def __str__(self) -> str:
        last = self.text.strip().splitlines()
        numbers = ", ".join(map(str, sorted(self.numbers)[:20])) + ", ..." * (self.count > 20)
        what = f"programs {numbers}" if self.count > 1 else f"program {numbers}"
        return f"{what}; the smallest found:\n\n{self.case}\n" + "\n".join(f"# {x}" for x in last)


@dataclass
class FuzzReport:
    """The outcome of a run.

    Attributes:
      programs: how many ran.
      unclear: those of them in which rounding decides what is computed.
      failures: by what they have in common, a line.
      seconds: it took.
    """

    programs: int = 0
    unclear: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        failed = sum(f.count for f in self.failures.values())
        lines = [
            f"{self.programs} programs in {self.seconds:.0f} s: {failed} failed in "
            f"{len(self.failures)} ways, {self.unclear} depend on rounding"
        ]
        for name, failure in self.failures.items():
            lines += ["", f"== {name}", str(failure)]
        return "\n".join(lines)

    @property
    def progress(self) -> str:
        """A line."""
        failed = sum(f.count for f in self.failures.values())
        return f"{self.programs} programs, {failed} failed, {self.unclear} unclear"

    def add(self, other: "FuzzReport") -> None:
        """Adds what came out of other programs."""
        self.programs += other.programs
        self.unclear += other.unclear
        for kind, theirs in other.failures.items():
            mine = self.failures.setdefault(kind, Failure(theirs.case, theirs.text))
            mine.numbers += theirs.numbers
            mine.propose(theirs.case, theirs.text)


def kind_of(error: BaseException) -> str:
    """A line that errors of one cause have in common."""
    (first, *_) = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', first)[:80]}"


def short_traceback(error: BaseException) -> str:
    """The error, and the last lines of the package that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "jedbatch" in f.filename and "/testing/" not in f.filename]
    shown = [f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in ours[-4:]]
    notes = getattr(error, "__notes__", [])
    return "\n".join([f"{type(error).__name__}: {error}", *notes, *shown])


def draw(seed: int, number: int, decides: bool | None = None) -> Case:
    """One random program.

    Args:
      seed: of all programs.
      number: which.
      decides: whether it may decide on computed values; None to draw that.
    """
    drawn: list[Case] = []
    _search(seed, number, decides, [hypothesis.Phase.generate], lambda case: drawn.append(case))
    return drawn[-1]


def _search(
    seed: int, number: int, decides: bool | None, phases: Sequence[Any], run: Callable[[Case], None]
) -> None:
    """Has Hypothesis run its simplest case, then the one of a number, and smaller ones if asked."""
    options = hypothesis.settings(
        max_examples=2,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=phases,
        report_multiple_bugs=False,
    )
    found = hypothesis.given(cases(decides))(run)
    hypothesis.seed(seed * 1_000_003 + number)(options(found))()


class Fuzz:
    """A search for programs that fail.

    Every new way to fail is made small at once, for at most `shrink` seconds; then the search goes
    on. With 0 seconds, the smallest program that is found is all. With `plans`, programs are only
    planned, and the plans checked: no program decides on values, and nothing is compiled.
    """

    def __init__(
        self, shrink: float = SHRINK, tell: Callable[[str], None] = print, plans: bool = False
    ):
        self.report = FuzzReport()
        self.plans = plans
        self.shrink = shrink
        self.tell = tell

    def run(self, programs: int, seed: int, first: int = 0) -> FuzzReport:
        """Runs so many programs, from a number on."""
        start = time.perf_counter()
        for number in range(first, first + programs):
            self._count(seed, number)
        self.report.seconds = time.perf_counter() - start
        return self.report

    @property
    def _decides(self) -> bool | None:
        return False if self.plans else None

    def _count(self, seed: int, number: int) -> None:
        report = self.report
        case = draw(seed, number, self._decides)
        error = self._attempt(case)
        report.programs += 1
        if report.programs % FORGET == 0:
            jax.clear_caches()
        if isinstance(error, UnclearError):
            report.unclear += 1
        elif error is not None:
            kind = kind_of(error)
            known = kind in report.failures
            failure = report.failures.setdefault(kind, Failure(case, ""))
            failure.numbers.append(number)
            failure.propose(case, short_traceback(error))
            if not known:
                if self.shrink:
                    self._make_small(seed, number, case, error)
                self.tell(f"== {kind}\n{failure}\n")
        if report.programs % TELL == 0:
            self.tell(report.progress)

    def _make_small(self, seed: int, number: int, case: Case, error: Exception) -> None:
        """Looks for smaller programs that fail like one, and keeps the smallest."""
        kind, until = kind_of(error), time.perf_counter() + self.shrink
        failure = self.report.failures[kind]
        outcomes: dict[Case, Exception | None] = {case: error}

        def run(smaller: Case) -> None:
            if smaller not in outcomes:
                late = time.perf_counter() > until
                outcomes[smaller] = None if late else self._attempt(smaller)
            found = outcomes[smaller]
            if found is not None and kind_of(found) == kind:
                failure.propose(smaller, short_traceback(found))
                raise found

        phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
        try:
            _search(seed, number, self._decides, phases, run)
        except Exception as last:
            if kind_of(last) != kind:
                raise

    def _attempt(self, case: Case) -> Exception | None:
        """Returns the exception that checking a case raises; None if it passes."""
        try:
            case.check_plans() if self.plans else case.check()
        except Exception as error:
            return error
        return None


def run(
    programs: int,
    seed: int,
    shrink: float = SHRINK,
    plans: bool = False,
    *,
    first: int = 0,
    jobs: int = 1,
) -> FuzzReport:
    """Runs random programs.

    Args:
      programs: how many.
      seed: of the random choices; the same seed and number give the same program in one version of
        Hypothesis.
      shrink: seconds in which a new failure is made small.
      plans: whether programs are only planned, and the plans checked; much faster.
      first: the number of the first.
      jobs: processes that run them.

    Returns:
      What came out; print it.
    """
    if jobs == 1:
        return Fuzz(shrink, plans=plans).run(programs, seed, first)
    start = time.perf_counter()
    total = FuzzReport()
    context = multiprocessing.get_context("spawn")  # JAX has threads, which a fork does not copy
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=PARTS) as pool:
        end = first + programs
        parts = [
            pool.submit(_part, min(PART, end - begin), seed, shrink, plans, begin)
            for begin in range(first, end, PART)
        ]
        for part in as_completed(parts):
            total.add(part.result())
            print(total.progress)
    total.seconds = time.perf_counter() - start
    return total


def _part(programs: int, seed: int, shrink: float, plans: bool, first: int) -> FuzzReport:
    """Runs some programs in a process of its own, and prints only what fails."""

    def tell(line: str) -> None:
        if line.startswith("=="):
            print(line, flush=True)

    return Fuzz(shrink, tell, plans).run(programs, seed, first)
