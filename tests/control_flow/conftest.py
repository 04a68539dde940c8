"""Fixtures of several tests of decisions on values."""

import pytest

from jedbatch._control_flow.workspace import Workspace


@pytest.fixture
def planned(monkeypatch):
    """An entry for every round that is planned, not repeated."""
    rounds, compute = [], Workspace._compute

    def counted(workspace, *args):
        rounds.append(workspace)
        return compute(workspace, *args)

    monkeypatch.setattr(Workspace, "_compute", counted)
    return rounds
