"""Reads what compilers dump, without JAX: HLO, buffers, live ranges; and says where memory and work go."""
