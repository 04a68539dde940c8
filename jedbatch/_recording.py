"""The records of a minibatch: those that are known, and new ones.

An instance is recorded once; another one with the same key has the same graph. Arrays that differ
in length do not make another key, as long as the function can be recorded without knowing lengths
(see `_lengths`).
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jedbatch._instances import array_type, immutable, instance_key
from jedbatch._session import Session
from jedbatch._trace import trace


class LengthsMatterError(Exception):
    """Instances must be recorded again, since their lengths are looked at in another way."""


def keyed(i: int, instance: tuple) -> tuple[Hashable | None, list[Any]]:
    """(the key of instance number i, its arrays)."""
    try:
        return instance_key(instance[0] if len(instance) == 1 else instance)
    except TypeError as error:
        error.add_note(f"This happened while instance {i} was read.")
        raise


@dataclass(frozen=True)
class Recording:
    """How instances of a function are recorded.

    Attributes:
      fn: the function.
      join: makes its arguments from the shared and the mapped ones.
      key: what decides the graph of an instance, if the user says so.
    """

    fn: Callable
    join: Callable
    key: Callable[..., Hashable] | None

    def find(self, session: Session, instances: Sequence[tuple], read: Callable | None = None):
        """(records of the instances, their arrays, closed-over tracers, how many were known)."""
        records: list[Any] = [None] * len(instances)
        keys: list[Hashable] = [None] * len(instances)
        arrays: list[Sequence[Any]] = [()] * len(instances)
        for i, instance in enumerate(instances):
            what = instance[0] if len(instance) == 1 else instance
            if (same := session.seen.get(id(what))) is not None:
                records[i] = same[1]
                continue
            keys[i], arrays[i] = keyed(i, instance)
            if self.key is not None:
                ids = list(map(id, arrays[i]))
                form = [("array", *array_type(x), ids.index(id(x))) for x in arrays[i]]
                keys[i] = ("given", self.key(*instance), *form)
        given = session.look(keys, arrays)
        for i, g in enumerate(given):
            keys[i] = keys[i] if g is None else g.key
            if records[i] is None and keys[i] is not None:
                records[i] = session.records.get(keys[i])
        first: dict[Hashable, int] = {}
        new = [
            i
            for i, (k, record) in enumerate(zip(keys, records, strict=True))
            if record is None and (k is None or first.setdefault(k, i) == i)
        ]
        if not new:
            return records, arrays, [], len(instances)
        mine: list[Any] = [[x[i] for i in new] for x in (instances, arrays, given)]
        try:
            made, keep, tracers = self._record(session, mine[0], mine[1], mine[2], read)
        except LengthsMatterError:
            return self.find(session, instances, read)
        fresh = dict(zip(new, made, strict=True))
        for i, k in enumerate(keys):
            if records[i] is None:
                records[i] = fresh[i if k is None else first[k]]
        for i, kept in zip(new, keep, strict=True):
            if not kept or keys[i] is None:
                continue
            session.records[keys[i]] = records[i]
            what = instances[i][0] if len(instances[i]) == 1 else instances[i]
            if isinstance(keys[i], bytes) and len(instances[i]) == 1 and immutable(what):
                session.seen[id(what)] = what, records[i]
        return records, arrays, tracers, len(instances) - len(new)

    def _record(self, session: Session, instances, arrays, given, read) -> Any:
        """Records instances: (records, whether to keep each, closed-over tracers).

        Arrays that differ in length are recorded for every length. What cannot be, is recorded as
        it is, and from then on arrays are told apart by their shapes.

        Raises `LengthsMatterError` if they must be looked at again.
        """
        record = functools.partial(trace, self.fn, session.registry, instances, arrays, self.join)
        if not any(given):
            return record(session.grouping, read)
        try:
            made, keep, tracers = record(types=[g and g.types for g in given])
            cuts = [
                g and session.regions.cut(x, len(mine), g.symbols)
                for g, x, mine in zip(given, made, arrays, strict=True)
            ]
            for cut in filter(None, cuts):
                cut.note()
            if session.numbers_differ():
                raise LengthsMatterError
            made = [cut.result() if cut else x for cut, x in zip(cuts, made, strict=True)]
        except LengthsMatterError:
            raise
        except Exception as error:
            if not session.bind():
                record(session.grouping, read)  # complains if lengths are not the reason
                session.lengths.give_up(error)
            raise LengthsMatterError from None
        agree = True
        for g, made_of, mine in zip(given, made, arrays, strict=True):
            agree &= g is None or session.lengths.learn(g, made_of, mine)
        if not agree:
            raise LengthsMatterError
        return made, keep, tracers
