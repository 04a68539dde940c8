"""Assumptions: what is constant until more than a few variants of it were met."""

from jedbatch._record.identity.assumptions import VARIANTS_BYTES, Assumptions
from jedbatch._support.caches import Budget


def test_what_was_met_in_few_variants_is_constant():
    """Whatever comes later, it is not once there were more."""
    assumptions = Assumptions()
    assert [assumptions.holds("numbers", "scale", k, 2) for k in (1, 2, 1, 3, 1)] == (
        [True, True, True, False, False]
    )
    assert assumptions.has_failed("numbers", "scale")
    assert assumptions.holds("numbers", "shift", 3, 2)
    assert not assumptions.has_failed("numbers", "shift")
    assert len(assumptions) == 1


def test_versions_are_those_of_groups():
    assumptions = Assumptions()
    for k in range(5):
        assumptions.holds("numbers", "scale", k, 2)
        assumptions.holds("types", "scale", k, 9)
    assumptions.fail("lengths")
    assumptions.fail("lengths")
    groups = ("numbers", "types", "lengths")
    assert list(map(assumptions.version, groups)) == [1, 0, 2]
    assert assumptions.version(*groups) == 3
    assert str(assumptions) == "<Assumptions: 2 of lengths, 1 of numbers failed>"


def test_what_has_failed_is_not_forgotten():
    """Variants are, where they take too many bytes."""
    assumptions = Assumptions(Budget(2 * VARIANTS_BYTES))
    for k in range(2):
        assert assumptions.holds("numbers", "few", k, 2)
        assumptions.holds("numbers", "many", k, 1)
    for k in range(8):
        assert assumptions.holds("numbers", ("another", k), k, 1)
    assert assumptions.holds("numbers", "few", 2, 2)
    assert not assumptions.holds("numbers", "many", 0, 1)
