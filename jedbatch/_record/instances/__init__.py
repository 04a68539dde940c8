"""Instances: their arrays and their keys."""
