"""The only file that touches `jax._src`, and what differs between JAX versions.

Everything here exists because no public name does. Tested on jax 0.10.2 and 0.12.
"""

from jax._src.interpreters import partial_eval as _pe

SAVEABLE = _pe.Saveable
RECOMPUTE = _pe.Recompute


def offloadable(source: str, destination: str) -> object:
    """The verdict of a checkpoint policy that moves a value from one memory kind to another."""
    return _pe.Offloadable(src=source, dst=destination)
