"""Policies as finite-state machines: tables from what a frontier looks like to a type.

A learned policy should be small enough to read and general enough to fit minibatches it has not
seen. So it sees an *encoding* of the frontier (`_schedule.encodings`), a few words about each type
that has ready nodes, and looks up which type to run.

Components of types are run in sequence, and a type that is ready alone is run, so a state is looked
up only where there is a choice. A state that is not in the table is left to a heuristic.

States that have the same types ready and run the same type are one state of the machine, which
is how it is printed, drawn and stored.

Source: Chen et al., ED-Batch, ICML 2023, section 2; the division into components is ours.
"""

import collections
import dataclasses
import functools
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jedbatch import checks
from jedbatch._graph.graph import Graph, checked_graph
from jedbatch._schedule.compiled import run_compiled
from jedbatch._schedule.components import by_component
from jedbatch._schedule.encodings import CODES, ENCODINGS, WORDS, Code, encode
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.heuristics import FALLBACKS
from jedbatch._schedule.policy import schedule
from jedbatch._schedule.schedule import Schedule, schedule_of
from jedbatch._support.files import content_of, read_text, reading, write_text
from jedbatch._support.state_diagram import state_diagram

FORMAT = "jedbatch policy, version 1"
MAX_MATCHED = 64  # lists of labels whose numbers are kept


@dataclass(frozen=True)
class State:
    """The encodings that lead to one decision while the same types are ready.

    Attributes:
      run: the type to run, a position in the machine's `types`.
      when: the encodings of frontiers that lead to it, sorted.
      next: pairs of a state that came after it while learning and how often.
    """

    run: int
    when: tuple[Code, ...]
    next: tuple[tuple[int, int], ...] = ()

    @property
    def ready(self) -> tuple[int, ...]:
        """The types that have ready nodes."""
        return tuple(c // CODES for c in self.when[0]) if self.when else ()


@dataclass(frozen=True)
class FSM:
    """A policy as a finite-state machine; a value that can be compared, hashed, saved and drawn.

    Use it as `policy=`; `jedbatch.learn` makes one. It prints as a table.

    Attributes:
      encoding: what it sees of a frontier: "base", "max", "sort" or "phase".
      types: labels of the node types it knows.
      states: its states, in the order in which they were met.
      fallback: the heuristic that decides in states it does not know.
      report: how it was learned and how good it is; not part of the files.
    """

    encoding: str
    types: tuple[str, ...]
    states: tuple[State, ...]
    fallback: str = "critical"
    report: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.check()

    @staticmethod
    def of(
        encoding: str,
        types: Sequence[str],
        table: Mapping[Code, int],
        moves: Mapping[tuple[Code, Code], int] | None = None,
        fallback: str = "critical",
    ) -> "FSM":
        """The machine with these decisions, states that can be one being one.

        Args:
          encoding: what the codes of frontiers mean.
          types: labels of the types.
          table: the type to run by the code of a frontier.
          moves: how often one code followed another.
          fallback: the heuristic for other codes.

        Returns:
          The machine.

        Raises:
          ValueError: this is no machine that can run.
        """
        groups: dict[tuple, list[Code]] = {}
        for code, t in table.items():
            groups.setdefault((t, *(c // CODES for c in code)), []).append(code)
        number = {code: i for i, codes in enumerate(groups.values()) for code in codes}
        counts: list[collections.Counter[int]] = [collections.Counter() for _ in groups]
        for (before, after), times in (moves or {}).items():
            if before in number and after in number:
                counts[number[before]][number[after]] += times
        states = (
            State(key[0], tuple(sorted(codes)), tuple(sorted(after.items())))
            for (key, codes), after in zip(groups.items(), counts, strict=True)
        )
        return FSM(encoding, tuple(types), tuple(states), fallback)

    def check(self) -> None:
        """Raises `ValueError` unless this is a machine that can run."""

        def require(condition: bool, what: str) -> None:
            if not condition:
                raise ValueError(
                    f"not a valid FSM: {what}; expected one as `jedbatch.learn` returns"
                )

        for name, known_names in (("encoding", ENCODINGS), ("fallback", FALLBACKS)):
            came = getattr(self, name)
            require(
                isinstance(came, str) and came in known_names,
                f"its {name} is {checks.brief(came)}, not one of {list(known_names)}",
            )
        for name, kind in (("types", str), ("states", State)):
            came = getattr(self, name)
            require(
                isinstance(came, tuple) and all(isinstance(x, kind) for x in came),
                f"its {name} are {checks.brief(came)}, not a tuple of {kind.__name__}",
            )
        require(len(set(self.types)) == len(self.types), "two of its types have the same label")
        words = WORDS[self.encoding]
        seen_codes = set()
        for state in self.states:
            require(bool(state.when), "a state has no encodings")
            for code in state.when:
                ready = [c // CODES for c in code]
                require(
                    bool(ready) and tuple(ready) == state.ready,
                    "the encodings of a state differ in which types are ready",
                )
                require(
                    ready == sorted(set(ready)) and ready[0] >= 0 and ready[-1] < len(self.types),
                    f"the encoding {code} names types that do not exist, or not in order",
                )
                require(
                    state.run in ready, f"a state runs type {state.run}, ready are only {ready}"
                )
                require(
                    all(c % CODES in words for c in code), f"{code} is no {self.encoding} encoding"
                )
                require(code not in seen_codes, f"the encoding {code} is in two states")
                seen_codes.add(code)
            for after, times in state.next:
                require(0 <= after < len(self.states) and times > 0, "a move leads nowhere")

    @functools.cached_property
    def table(self) -> dict[Code, int]:
        """The type to run by the code of a frontier."""
        return {code: state.run for state in self.states for code in state.when}

    def numbers(self, labels: Sequence[str]) -> list[int]:
        """Returns the machine's number of each label; a negative number if there is none.

        Args:
          labels: of node types.

        Returns:
          A position in `types` for each, or a negative number.
        """
        return list(matched_before(self.types, tuple(labels)))

    def schedule(self, graph: Graph) -> Schedule:
        """Schedules a graph; `unseen` of the result counts the batches left to the fallback.

        Args:
          graph: what to schedule.

        Returns:
          The schedule.

        Raises:
          TypeError: it is no graph.
        """
        checked_graph("FSM.schedule", graph)
        number = dict(zip(graph.labels, self.numbers(graph.labels), strict=True))
        batches = by_component(
            graph,
            lambda part: self._run(part, number),
            needs_chains=self.encoding == "phase",
        )
        return dataclasses.replace(batches, policy=f"FSM {self.encoding}")

    def _schedule_copies(self, graph: Graph, num_instances: int) -> Schedule:
        """Schedules a graph whose nodes count as several, of so many instances."""
        return self.schedule(graph)

    def _run(self, graph: Graph, number: Mapping[str, int]) -> Schedule:
        numbers = [number[label] for label in graph.labels]
        done = run_compiled(graph, self.fallback, self.encoding, self.table, numbers)
        if done is not None:
            batch_types, when, num_unseen = done
            return schedule_of(batch_types, when, self.fallback, unseen=num_unseen)
        fallback, table, unseen = FALLBACKS[self.fallback], self.table, 0

        def choose(frontier: Frontier) -> int:
            nonlocal unseen
            ready = frontier.ready_types
            if len(ready) == 1:
                return ready[0]
            run = table.get(encode(self.encoding, frontier, ready, numbers))
            if run is not None:
                return numbers.index(run)
            unseen += 1
            return fallback(frontier)

        batches = schedule(graph, choose)
        return dataclasses.replace(batches, unseen=unseen)

    def __len__(self) -> int:
        return len(self.states)

    # --- for people ---

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The types in short: the beginning of the label, numbered where that is not unique."""
        short = [re.split("[(@]", label)[0].strip() for label in self.types]
        return tuple(
            name if short.count(name) == 1 else f"{name}.{short[: i + 1].count(name)}"
            for i, name in enumerate(short)
        )

    def describe(self, code: Code) -> str:
        """An encoding in words, such as `char tallest many, word low turning`.

        Args:
          code: an encoding of a frontier.

        Returns:
          Words for each type that is ready.
        """
        if len(code) == 1:
            return self.names[code[0] // CODES]
        words = WORDS[self.encoding]
        return ", ".join(f"{self.names[c // CODES]} {words[c % CODES]}".strip() for c in code)

    def __str__(self) -> str:
        num_codes = sum(len(s.when) for s in self.states)
        lines = [
            f"FSM over {self.encoding}: {len(self.states)} states, {num_codes} encodings, "
            f"otherwise {self.fallback}"
        ]
        width = max((len(self.names[s.run]) for s in self.states), default=3)
        lines.append(f"  state  {'run':{width}}  when")
        for i, state in enumerate(self.states):
            first, *alternatives = map(self.describe, state.when)
            lines.append(f"  {i:5}  {self.names[state.run]:{width}}  {first}")
            lines += [f"  {'':5}  {'':{width}}  or {text}" for text in alternatives]
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        """The state diagram, for notebooks."""
        boxes = []
        for state in self.states:
            ready = ", ".join(self.names[t] for t in state.ready)
            note = [] if len(state.when) == 1 else [f"{len(state.when)} encodings"]
            boxes.append((f"run {self.names[state.run]}", [f"ready: {ready}", *note]))
        arrows = [(i, j, n) for i, s in enumerate(self.states) for j, n in s.next]
        return state_diagram(boxes, arrows)

    # --- files ---

    def to_json(self) -> str:
        """The machine as text: see `save`.

        Returns:
          The text.
        """
        words = WORDS[self.encoding]

        def spelled(code: Code) -> dict[str, str]:
            texts = [words[c % CODES] for c in code] if len(code) > 1 else [""]
            return {self.types[c // CODES]: w for c, w in zip(code, texts, strict=True)}

        states = [
            {
                "run": self.types[state.run],
                "when": list(map(spelled, state.when)),
                "next": {str(after): times for after, times in state.next},
            }
            for state in self.states
        ]
        content = {"format": FORMAT, "encoding": self.encoding, "fallback": self.fallback}
        return json.dumps({**content, "types": self.types, "states": states}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, source: str = "the text") -> "FSM":
        """Reads what `to_json` wrote; raises `ValueError` on anything else.

        Args:
          text: what `to_json` wrote.
          source: named in errors.

        Returns:
          The machine.

        Raises:
          TypeError: it is no text.
          ValueError: it is not a policy, or one of another version.
        """
        checks.of_type("FSM.from_json", text, str, "a text", "`FSM.load` reads a file.")
        with reading("FSM", source):
            content = content_of(text, FORMAT)
            encoding, types = content["encoding"], content["types"]
            for name in ("types", "states"):
                if not isinstance(content[name], list):
                    raise ValueError(f"its {name} are {checks.brief(content[name])}, not a list")
            if encoding not in tuple(ENCODINGS):
                raise ValueError(
                    f"its encoding is {checks.brief(encoding)}, not one of {list(ENCODINGS)}"
                )
            number = {label: i for i, label in enumerate(types)}
            codes = {word: code for code, word in WORDS[encoding].items()} | {"": 0}
            states = tuple(
                State(
                    number[state["run"]],
                    tuple(
                        tuple(sorted(CODES * number[t] + codes[w] for t, w in code.items()))
                        for code in state["when"]
                    ),
                    tuple((int(after), operator.index(n)) for after, n in state["next"].items()),
                )
                for state in content["states"]
            )
            return FSM(encoding, tuple(types), states, content["fallback"])

    def save(self, path: str | Path) -> None:
        """Writes the machine as JSON: types by label, each state with what it runs and when.

        The file is written whole or not at all.

        Args:
          path: the file.
        """
        write_text("FSM.save", path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> "FSM":
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          The machine.

        Raises:
          FileNotFoundError: there is no such file.
          TypeError: it is no name of a file.
          ValueError: it is not a policy, or one of another version.
        """
        return FSM.from_json(*read_text("FSM.load", path))


@functools.lru_cache(maxsize=MAX_MATCHED)
def matched_before(known_labels: tuple[str, ...], labels: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the same as `match_labels`, remembered for minibatches to come."""
    return tuple(match_labels(known_labels, labels))


def match_labels(known_labels: Sequence[str], labels: Sequence[str]) -> list[int]:
    """The place of each label among those that are known; a negative number of its own if none.

    Labels that differ in sizes only are taken to be the same if there are equally many of them on
    both sides: what was learned with 64 hidden units serves 256 as well.
    """
    place = {label: i for i, label in enumerate(known_labels)}
    numbers = [place.get(label, -1 - i) for i, label in enumerate(labels)]
    if min(numbers, default=0) >= 0:
        return numbers
    known_forms, new_forms = (
        by_form(set(known_labels).difference(labels)),
        by_form(set(labels).difference(known_labels)),
    )
    same: dict[str, str] = {}
    for form, same_form in new_forms.items():
        if len(known_forms.get(form, ())) == len(same_form):
            same.update(zip(same_form, known_forms[form], strict=True))
    return [
        place[same[label]] if label in same else n for label, n in zip(labels, numbers, strict=True)
    ]


def by_form(labels: Iterable[str]) -> dict[str, list[str]]:
    """The labels, grouped by what is left if sizes are left out; each group sorted by size."""
    shape = re.compile(r"(?<=\w)\[[\d,]*\]")  # as in f32[64]
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(shape.sub(lambda m: re.sub(r"\d+", "_", m[0]), label), []).append(label)

    def sizes(label: str) -> tuple:
        return [list(map(int, re.findall(r"\d+", s))) for s in shape.findall(label)], label

    return {form: sorted(members, key=sizes) for form, members in groups.items()}
