"""Values that can be differentiated in reverse mode only: `reverse_mode_only`.

JAX answers forward-mode differentiation of a custom VJP without saying which function it is, and under jit only when the program
is compiled. Here tangents pass a linear operation of our own, which reverse mode transposes and never runs; whoever runs it, or
compiles it, gets our error.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from remat_kit.errors import ForwardModeError


def reverse_mode_only(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays; forward-mode differentiation through them is an error that names the remedy."""
    return [_guard(array) if jnp.issubdtype(array.dtype, jnp.inexact) else array for array in arrays]


@jax.custom_jvp
def _guard(array: jax.Array) -> jax.Array:
    return array


@_guard.defjvp
def _guard_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], _tangent.bind(tangents[0])


def _refuse(*_: Any, **__: Any) -> Any:
    raise ForwardModeError(
        "a stack whose layers follow different policies, or groups, has no forward-mode derivative (jax.jvp, jax.linearize, "
        "jax.jacfwd): use a plan with one policy there, or reverse mode (jax.vjp, jax.grad, jax.jacrev, jax.hessian)."
    )


_tangent = Primitive("remat_kit_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(_tangent, _refuse)
ad.primitive_transposes[_tangent] = lambda cotangent, _: [cotangent]
ad.primitive_jvps[_tangent] = lambda primals, tangents: (_tangent.bind(*primals), tangents[0])
batching.primitive_batchers[_tangent] = lambda args, axes: (_tangent.bind(*args), axes[0])
