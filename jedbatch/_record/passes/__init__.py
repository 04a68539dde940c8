"""Passes over recorded nodes: some of them become one, or nodes of their own."""
