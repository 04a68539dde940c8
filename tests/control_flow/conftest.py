"""Fixtures of several tests of decisions on values."""

import pytest

from jedbatch._control_flow.workspace import Workspace


def calls_of(method, monkeypatch):
    """An entry for every call of a method of workspaces."""
    calls, made = [], getattr(Workspace, method)

    def counted(workspace, *args):
        calls.append(workspace)
        return made(workspace, *args)

    monkeypatch.setattr(Workspace, method, counted)
    return calls


@pytest.fixture
def planned(monkeypatch):
    """An entry for every round that is planned, not repeated."""
    return calls_of("_compute", monkeypatch)


@pytest.fixture
def programs_run(monkeypatch):
    """An entry for every call of a program of rounds."""
    return calls_of("_run", monkeypatch)
