"""Molecules: graphs with cycles, of varying size.

A molecule is `(atoms, bonds, target)`: the kinds of its atoms, its bonds `(i, j, kind)`, each once
and without a direction, and a number to predict.
"""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jedbatch import checks
from jedbatch.data.each import each, vocabularies
from jedbatch.data.lines import entry, json_object, read_lines, reader, strings
from jedbatch.data.vocabulary import Vocabulary

Molecule = tuple[tuple[Any, ...], tuple[tuple[int, int, Any], ...], float]  # atoms, bonds, target

# Shares of the kinds of atoms C, N, O, F, Cl, S, Br, P: those with one bond, and the others.
_ATOMS_AT_ENDS = np.array([0.40, 0.06, 0.32, 0.09, 0.09, 0.01, 0.02, 0.01])
_ATOMS_INSIDE = np.array([0.80, 0.14, 0.04, 0.0, 0.0, 0.019, 0.0, 0.001])


@reader
def read_molecules(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Molecule]:
    """Reads molecules, one JSON object a line, gzipped if the name ends in `.gz`.

    A line holds `{"atoms": ["C", "O"], "bonds": [[0, 1, 2]], "y": -0.5}`: a symbol for each atom,
    for each bond the positions of two atoms, counted from 0, and its kind, and the number to
    predict. What else it holds is left alone.

    Args:
      path: the file.
      limit: the number of molecules to read at most.

    Returns:
      Molecules `(atoms, bonds, target)`, atoms as strings. `read_molecules.stream` reads them one
      by one.

    Raises:
      ValueError: names the file and the line that is not a molecule.
    """
    expected = 'one molecule a line, such as {"atoms": ["C", "O"], "bonds": [[0, 1, 2]], "y": -0.5}'
    return read_lines(path, limit, _molecule, expected)


def _molecule(line: str) -> Molecule:
    """The molecule in a line."""
    record = json_object(line)
    atoms = strings(record, "atoms")
    target = entry(record, "y", (int, float), "a number")
    if not math.isfinite(target):
        raise ValueError(f'"y" is {target}; expected a finite number')
    bonds, connected = [], set()
    for bond in entry(record, "bonds", list, "a list"):
        if not isinstance(bond, list) or len(bond) != 3 or isinstance(bond[2], (list, dict)):
            raise ValueError(f"{bond!r} is no bond, such as [0, 1, 2]")
        i, j, kind = bond
        if not all(type(k) is int and 0 <= k < len(atoms) for k in (i, j)) or i == j:
            raise ValueError(f"the bond {bond!r} is not between two of the {len(atoms)} atoms")
        if frozenset((i, j)) in connected:
            raise ValueError(f"there is a second bond between atoms {i} and {j}")
        connected.add(frozenset((i, j)))
        bonds.append((i, j, kind))
    return atoms, tuple(bonds), float(target)


def index_molecules(
    molecules: Sequence[Molecule], atoms: Vocabulary, bonds: Vocabulary
) -> list[Molecule]:
    """The molecules with numbers for kinds of atoms and of bonds."""
    vocabularies("index_molecules", atoms=atoms, bonds=bonds)

    def index(molecule: Molecule) -> Molecule:
        kinds, connections, target = molecule
        bound = tuple((i, j, bonds[kind]) for i, j, kind in connections)
        return tuple(atoms[atom] for atom in kinds), bound, target

    return each("index_molecules", molecules, index, "(atoms, bonds, target)")


@checks.sizes
def synthetic_molecules(
    num_molecules: int, *, seed: int = 0, mean_atoms: float = 24.1
) -> list[Molecule]:
    """Random graphs shaped like small molecules.

    Sizes follow a normal distribution (24.1 atoms on average, 5 % above 37). There is a ring for
    every eight atoms, most of six atoms, alone or sharing a bond with another; chains and single
    atoms hang on them. Of the atoms 17 % have one neighbour, 51 % two, 30 % three. The target is a
    sum over atoms and bonds of what their kinds contribute, so a bond counts by what it connects.

    Args:
      num_molecules: how many.
      seed: of the random generator; the same seed gives the same molecules.
      mean_atoms: atoms per molecule on average.

    Returns:
      Molecules `(atoms, bonds, target)`: kinds of atoms below 8, bonds `(i, j, kind)` with kinds 0
      (single), 1 (double), 2 (triple) and 3 (aromatic), and targets, mostly of -4 to 2.

    Examples:
      >>> from jedbatch.data import synthetic_molecules
      >>> atoms, bonds, target = synthetic_molecules(1, seed=1, mean_atoms=3)[0]
      >>> len(atoms) > max(j for _, j, _ in bonds)
      True
    """
    rng = np.random.default_rng(seed)
    nature = np.random.default_rng(20_27)  # what kinds contribute does not depend on the seed
    contribution = nature.normal(0, 0.25, 8)
    affinity = nature.normal(0, 0.25, (8, 8, 4))
    molecules = []
    for _ in range(num_molecules):
        size = max(1, round(mean_atoms * (1 + 0.36 * rng.standard_normal())))
        bonds = _skeleton(rng, size)
        degrees = np.bincount([k for i, j, _ in bonds for k in (i, j)], minlength=size)
        atoms = np.where(
            degrees < 2, rng.choice(8, size, p=_ATOMS_AT_ENDS), rng.choice(8, size, p=_ATOMS_INSIDE)
        )
        target = contribution[atoms].sum()
        for i, j, kind in bonds:
            target += affinity[min(atoms[i], atoms[j]), max(atoms[i], atoms[j]), kind]
        molecules.append((tuple(atoms.tolist()), tuple(bonds), round(float(target), 3)))
    return molecules


def _skeleton(rng: np.random.Generator, size: int) -> list[tuple[int, int, int]]:
    """Bonds of a connected graph of rings and chains."""
    degrees = [0]
    bonds: list[tuple[int, int, int]] = []
    fusible: list[tuple[int, int]] = []  # bonds of rings that another ring may share

    def bond(i: int, j: int, kind: int) -> None:
        bonds.append((i, j, kind))
        degrees[i] += 1
        degrees[j] += 1

    def chain(length: int, kind: int) -> range:
        """New atoms, bound to each other."""
        new = range(len(degrees), len(degrees) + length)
        degrees.extend([0] * length)
        for i in new[:-1]:
            bond(i, i + 1, kind)
        return new

    while (room := size - len(degrees)) > 0:
        most = 4 if rng.random() < 0.05 else 3
        free = [k for k, degree in enumerate(degrees) if degree < most]
        anchor = free[-1] if rng.random() < 0.5 else free[rng.integers(len(free))]
        ring, kind = 5 + int(rng.random() < 0.8), 3 * int(rng.random() < 0.75)
        open_bonds = [(i, j) for i, j in fusible if degrees[i] == degrees[j] == 2]
        if room >= ring - 2 and open_bonds and rng.random() < 0.12:
            i, j = open_bonds[rng.integers(len(open_bonds))]
            new = chain(ring - 2, kind)
            bond(i, new[0], kind)
            bond(j, new[-1], kind)
        elif room >= ring and rng.random() < 0.33:
            new = chain(ring, kind)
            bond(new[0], new[-1], kind)
            bond(anchor, new[0], 0)
            fusible += [(i, i + 1) for i in new[1:-1]]
        else:
            (new_atom,) = chain(1, 0)
            bond(anchor, new_atom, int(rng.choice(3, p=[0.75, 0.23, 0.02])))
    return bonds
