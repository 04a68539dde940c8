"""The graphs of instances: those that are known, and new ones."""
