"""From a lowered step to what the target's compiler says of it, in a process of its own.

`pool` is the parent's side and needs no JAX; the rest runs in the worker: `environment` before JAX is imported, `topology` makes
the target's devices, `compiler` compiles, `cache` remembers.
"""
