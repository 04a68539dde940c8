"""Calls of cells, recorded."""
