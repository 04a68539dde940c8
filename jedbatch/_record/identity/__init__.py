"""Whether functions, primitives and what they read are the same as before."""
