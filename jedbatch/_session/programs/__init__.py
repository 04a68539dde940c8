"""Kernels and compiled programs, and what they read besides instances."""
