"""Many random programs against the loop, for hours if need be; see `strategies` for a few."""

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from jedbatch.testing.cases import Case, UnclearError
from jedbatch.testing.strategies import cases, hypothesis

FORGET = 100  # programs after which JAX forgets what it has compiled
SHRINK = 120.0  # seconds spent on making a failure small, by default


@dataclass
class Failure:
    """One way to fail.

    Attributes:
      case: the smallest program found that does.
      text: the error and where it came from.
      count: programs that failed like this.
    """

    case: Case
    text: str
    count: int = 0

    def __str__(self) -> str:
        last = self.text.strip().splitlines()
        return f"{self.count} times:\n\n{self.case}\n" + "\n".join(f"# {x}" for x in last)


@dataclass
class Report:
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


class Fuzz:
    """A search for programs that fail.

    Every new way to fail is made small at once, for at most `shrink` seconds; then the search goes
    on. With 0 seconds, the smallest program that is found is all. With `plans`, programs are only
    planned, and the plans checked: no program decides on values, and nothing is compiled.
    """

    def __init__(
        self, shrink: float = SHRINK, tell: Callable[[str], None] = print, plans: bool = False
    ):
        self.report = Report()
        self.plans = plans
        self.shrink = shrink
        self.tell = tell
        self._current: str | None = None  # what is being made small
        self._until = 0.0
        self._outcomes: dict[Case, Exception | None] = {}

    def run(self, programs: int, seed: int) -> Report:
        """Runs so many programs."""
        start = time.perf_counter()
        rounds = 0
        while self.report.programs < programs:
            left = programs - self.report.programs
            self._current = None
            self._outcomes.clear()
            try:
                self._search(left, seed + 1_000_003 * rounds)
            except Exception:
                if self._current is None:
                    raise
                failure = self.report.failures[self._current]
                self.tell(f"== {self._current}\n{failure}\n")
            rounds += 1
        self.report.seconds = time.perf_counter() - start
        return self.report

    def _search(self, programs: int, seed: int) -> None:
        phases = (
            [hypothesis.Phase.generate, hypothesis.Phase.shrink]
            if self.shrink
            else [hypothesis.Phase.generate]
        )
        options = hypothesis.settings(
            max_examples=programs,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=phases,
            report_multiple_bugs=False,
        )
        found = hypothesis.given(cases(False if self.plans else None))(self._one)
        hypothesis.seed(seed)(options(found))()

    def _one(self, case: Case) -> None:
        """Runs one case; raises what is to be made small."""
        if self._current is None:
            self._count(case)
            return
        if case in self._outcomes:
            error = self._outcomes[case]
        elif time.perf_counter() > self._until:
            error = None
        else:
            error = self._outcomes[case] = self._attempt(case)
        if error is not None and kind_of(error) == self._current:
            failure = self.report.failures[self._current]
            if len(str(case)) < len(str(failure.case)):
                failure.case, failure.text = case, short_traceback(error)
            raise error

    def _count(self, case: Case) -> None:
        report = self.report
        report.programs += 1
        if report.programs % FORGET == 0:
            jax.clear_caches()
        if report.programs % 20 == 0:
            failed = sum(f.count for f in report.failures.values())
            self.tell(f"{report.programs} programs, {failed} failed, {report.unclear} unclear")
        error = self._attempt(case)
        if isinstance(error, UnclearError):
            report.unclear += 1
        elif error is not None:
            kind = kind_of(error)
            known = kind in report.failures
            failure = report.failures.setdefault(kind, Failure(case, ""))
            failure.count += 1
            if len(str(case)) <= len(str(failure.case)):
                failure.case, failure.text = case, short_traceback(error)
            if known:
                return
            if self.shrink:
                self._current, self._until = kind, time.perf_counter() + self.shrink
                self._outcomes[case] = error
                raise error
            self.tell(f"== {kind}\n{failure}\n")

    def _attempt(self, case: Case) -> Exception | None:
        """Returns the exception that checking a case raises; None if it passes."""
        try:
            case.check_plans() if self.plans else case.check()
        except Exception as error:
            return error
        return None


def run(programs: int, seed: int, shrink: float = SHRINK, plans: bool = False) -> Report:
    """Runs random programs.

    Args:
      programs: how many.
      seed: of the random choices; the same seed gives the same programs in one version of
        Hypothesis.
      shrink: seconds in which a new failure is made small.
      plans: whether programs are only planned, and the plans checked; much faster.

    Returns:
      What came out; print it.
    """
    return Fuzz(shrink, plans=plans).run(programs, seed)
