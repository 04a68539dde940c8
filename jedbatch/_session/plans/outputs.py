"""The form of a result: which rows of which arenas make up what a batched function returns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.storage import Kind, stored_kind
from jedbatch._program.output_spec import OutputSpec, PaddedPlace, Slice, with_batch
from jedbatch._program.placement import NO_VALUE
from jedbatch._program.plan import input_name

Returned = tuple[dict[Kind, list[int]], OutputSpec]  # rows of each arena, and how to read them
Form = tuple[Any, Sequence[Kind]]  # structure of a result, and (shape, dtype) of its leaves


def with_room(graph: Graph, returned: Returned, room: int) -> Returned:
    """Returns what arenas return with room for more instances, and the form of that.

    Args:
      graph: what is computed.
      returned: what each arena returns, by the position among the outputs of the graph, and how
        that becomes results; in the result, values take the place of positions, and `NO_VALUE`
        those of instances that are not there.
      room: rows of each result, if they are stacked; others have no room.
    """
    rows, form = returned
    values = {kind: graph.outputs[np.array(x, np.int64)] for kind, x in rows.items()}
    if form.batch is None:
        return {kind: x.tolist() for kind, x in values.items()}, form
    for kind, x in values.items():
        padded = np.full((len(x) // form.batch, room), NO_VALUE)
        padded[:, : form.batch] = x.reshape(-1, form.batch)
        values[kind] = padded.ravel()
    (places,) = form.places
    moved = tuple((kind, with_batch(place, form.batch, room)) for kind, place in places)
    form = OutputSpec(form.structures, (moved,), room)
    return {kind: x.tolist() for kind, x in values.items()}, form


class InstanceOutput(Protocol):
    """The structure and the types of the result of an instance."""

    @property
    def structure(self) -> Any:
        """The pytree structure."""

    @property
    def types(self) -> tuple[tuple, ...]:
        """(shape, dtype, ...) of every leaf."""


def check_stack(name: str, i: int, first: Form, form: Form) -> None:
    """Raises `ValueError` unless the results of instances 0 and i stack; `name` is for messages."""
    if (first[0], tuple(first[1])) != (form[0], tuple(form[1])):
        shown = [
            str(jax.tree.unflatten(structure, map(input_name, types))).replace("'", "")
            for structure, types in (first, form)
        ]
        raise ValueError(
            f"the results of instances 0 and {i} of the batched `{name}` do not "
            f"stack: {shown[0]} and {shown[1]}. Return the same "
            "shapes for every instance, or get a list with one result per instance by "
            "`jedbatch.batch(fn, out_axes=None)`."
        )


def form_of_results(
    name: str,
    records: Sequence[InstanceOutput],
    outputs: np.ndarray,
    slices: Sequence[Mapping[int, Slice | PaddedPlace]],
    stacked: bool,
) -> Returned:
    """(what each arena returns, the form of the result) from what all instances return.

    Args:
      name: of the function, for messages.
      records: structure and types of the results of each instance.
      outputs: what the graph returns, instance after instance.
      slices: the ragged results of each instance by position, which arenas do not return, or
        padded.
      stacked: along a new first axis, or a list of results.
    """
    if stacked and not any(slices):
        return _plain(name, records, outputs)
    rows: dict[Kind, list[int]] = {}
    references = iter(outputs.tolist())
    forms: list[Form] = []
    places = []
    for i, record in enumerate(records):
        ragged = slices[i] if slices else {}
        instance_results: list[tuple[Kind, Any]] = []
        for position, kind in enumerate(record.types):
            if position in ragged:
                place = ragged[position]
                if isinstance(place, PaddedPlace):
                    found = rows.setdefault(stored_kind(place.kind), [])
                    place = replace(place, first=len(found))
                    found.append(next(references))
                instance_results.append(((place.shape, kind[1]), place))
                continue
            found = rows.setdefault(stored_kind(kind), [])
            instance_results.append((kind, len(found)))
            found.append(next(references))
        forms.append((record.structure, [kind for kind, _ in instance_results]))
        places.append(tuple(instance_results))
    for i, form in enumerate(forms if stacked else ()):
        check_stack(name, i, forms[0], form)
    columns = zip(*places, strict=True) if stacked else ()
    are_mixed = any(len({type(place) for _, place in column}) > 1 for column in columns)
    if not stacked or are_mixed:
        structures = tuple(structure for structure, _ in forms)
        return rows, OutputSpec(structures, tuple(places), None, are_mixed)
    together: list[tuple[Kind, Any]] = []
    order: dict[Kind, list[int]] = {kind: [] for kind in rows}
    for column in zip(*places, strict=True):
        kind, place = column[0]
        if isinstance(place, Slice):
            together.append((kind, tuple(place for _, place in column)))
            continue
        if isinstance(place, PaddedPlace):
            stored = stored_kind(place.kind)
            together.append((kind, replace(place, first=len(order[stored]))))
            order[stored] += [rows[stored][own.first] for _, own in column]
            continue
        found = order[stored_kind(kind)]
        together.append((kind, len(found)))
        found += [rows[stored_kind(kind)][place] for _, place in column]
    return order, OutputSpec((forms[0][0],), (tuple(together),), len(records))


def _plain(name: str, records: Sequence[InstanceOutput], outputs: np.ndarray) -> Returned:
    """The form of results without ragged ones, stacked."""
    first = records[0]
    last = first
    for i, record in enumerate(records):
        if record.structure is last.structure and record.types is last.types:
            continue
        last = record
        check_stack(name, i, (first.structure, first.types), (record.structure, record.types))
    rows: dict[Kind, list[int]] = {}
    stacked = []
    for kind, column in zip(first.types, outputs.reshape(len(records), -1).T.tolist(), strict=True):
        references = rows.setdefault(stored_kind(kind), [])
        stacked.append((kind, len(references)))
        references += column
    return rows, OutputSpec((first.structure,), (tuple(stacked),), len(records))
