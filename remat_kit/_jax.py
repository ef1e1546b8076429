"""The only file that touches `jax._src`, and what differs between JAX versions.

Everything here exists because no public name does. Tested on jax 0.10.2 and 0.12.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxlib import _jax as _jaxlib

_PROGRAMS = (Jaxpr, ClosedJaxpr)

SAVEABLE = _pe.Saveable
RECOMPUTE = _pe.Recompute


def offloadable(source: str, destination: str) -> object:
    """The verdict of a checkpoint policy that moves a value from one memory kind to another."""
    return _pe.Offloadable(src=source, dst=destination)


def open_jaxpr(program: Any) -> tuple[Any, list[Any]]:
    """A (closed) jaxpr as what has `constvars`, `invars`, `eqns` and `outvars`, and the constants' values.

    0.10 keeps constants in a ClosedJaxpr around the Jaxpr, 0.12 in the Jaxpr itself.
    """
    inner = getattr(program, "jaxpr", program)
    return inner, list(getattr(program, "consts", ()))


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Constants and carried values of a `scan` equation; its other operands are sliced, its other results stacked."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since 0.12
    return len(consts), len(carry)


def checkpoint_name_of(eqn: Any) -> str | None:
    """The name that `checkpoint_name` gave, None for any other equation (with jax_remat3 it is a `call_hi_primitive`)."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    prim = eqn.params.get("_prim")
    return prim.name if type(prim).__name__ in ("CheckpointName", "CheckpointNameFwd") else None


def inner_programs(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters, in order; also those that a `call_hi_primitive` (jax_remat3) holds."""
    prim = eqn.params.get("_prim")
    params = eqn.params if prim is None else prim.params
    found = []
    for value in params.values():
        found += [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, _PROGRAMS)]
    return found


def user_frames(eqn: Any) -> Iterator[tuple[str, int]]:
    """File and line of the code that made an equation, innermost first, without JAX's own."""
    for frame in _source_info_util.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.start_line


def backends_are_initialized() -> bool:
    """Whether JAX has opened its devices in this process; from then on `jax_platforms` and XLA_FLAGS change nothing."""
    return _xla_bridge.backends_are_initialized()


def lowered_device_ids(lowered: Any) -> tuple[int, ...]:
    """The devices that a `jax.stages.Lowered` is for, in the order of its partitions; its text does not say."""
    return tuple(device.id for device in lowered._lowering._device_list or ())


def lowered_compiler_options(lowered: Any) -> tuple[tuple[str, Any], ...]:
    """What `jax.jit(compiler_options=…)` gave to a `jax.stages.Lowered`; every compile of it gets them."""
    return tuple(lowered._lowering._compiler_options_kvs)


def compiler_option_names() -> tuple[str, ...]:
    """Compiler options that jaxlib can name: a small part of what XLA knows."""
    options = _jaxlib.CompileOptions().executable_build_options.debug_options
    return tuple(name for name in dir(options) if name.startswith("xla_"))
