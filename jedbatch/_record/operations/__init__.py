"""Symbols, and what is recorded when JAX or Python computes with them."""
