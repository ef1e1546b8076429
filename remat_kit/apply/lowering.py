"""From a policy, which is data, to the callable that `jax.checkpoint` asks about every operation.

The callable is itself a frozen value, and `lower_policy` gives the same object for equal policies: JAX caches what it traced by
the identity of the callable, so nothing is traced twice for the same policy.
"""

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from jax.extend.core import Primitive

from remat_kit import _jax
from remat_kit.operations import KERNELS, MATMULS, matmul_flops
from remat_kit.policy import Action, ByKind, Cheap, Kind, Named, Remat, Rule, Smaller, matches

WEIGHTS_NAME = "remat_kit.weights"
"""What the outputs of matmuls by weights are named, see `remat_kit.apply.weights`."""

HOST_MEMORY_KIND = "pinned_host"

_CALLED = "call_jaxpr"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CheckpointPolicy:
    """What `jax.checkpoint(policy=…)` takes: asked for each operation, it answers save, offload or recompute.

    Attributes:
        rules: The policy's rules; the last one that matches an operation decides, none = recompute.
    """

    rules: tuple[Rule, ...]

    def __call__(self, primitive: Primitive, *avals: object, **params: object) -> object:
        """JAX's verdict for one operation, given its operands' shapes and its parameters."""
        for rule in reversed(self.rules):
            verdict = _verdict(rule, primitive, avals, params)
            if verdict is not None:
                return verdict
        return _jax.RECOMPUTE


@functools.cache
def lower_policy(policy: Remat) -> Any:
    """Lowers a policy to what `jax.checkpoint` takes; `full` is None, as in JAX."""
    return CheckpointPolicy(policy.rules) if policy.rules else None


def _verdict(rule: Rule, primitive: Primitive, avals: tuple[Any, ...], params: dict[str, Any]) -> object | None:
    match rule:
        case Named(action, patterns):
            name = _jax_name(primitive, params)
            hit = name is not None and any(matches(pattern, name) for pattern in patterns)
            return _named_verdict(action) if hit else None
        case ByKind(Kind.DOTS):
            return _jax.SAVEABLE if primitive.name in MATMULS else None
        case ByKind(Kind.DOTS_NO_BATCH):
            return _jax.SAVEABLE if _is_unbatched_dot(primitive, params) else None
        case ByKind(Kind.KERNELS):
            return _jax.SAVEABLE if primitive.name in KERNELS else None
        case ByKind():
            return _jax.SAVEABLE if _jax_name(primitive, params) == WEIGHTS_NAME else None
        case Smaller(max_bytes):
            return _jax.SAVEABLE if _output_bytes(primitive, avals, params) <= max_bytes else None
        case Cheap(max_flops_per_byte):
            flops = _operation_flops(primitive, avals, params)
            return _jax.RECOMPUTE if flops <= max_flops_per_byte * _output_bytes(primitive, avals, params) else None
        case _:
            assert_never(rule)


def _jax_name(primitive: Primitive, params: dict[str, Any]) -> str | None:
    return params["name"] if primitive.name == "name" else None


def _named_verdict(action: Action) -> object:
    match action:
        case Action.SAVE:
            return _jax.SAVEABLE
        case Action.OFFLOAD:
            return _jax.offloadable("device", HOST_MEMORY_KIND)
        case Action.RECOMPUTE:
            return _jax.RECOMPUTE
        case _:
            assert_never(action)


def _is_unbatched_dot(primitive: Primitive, params: dict[str, Any]) -> bool:
    if primitive.name != "dot_general":
        return False
    _, (left_batch, right_batch) = params["dimension_numbers"]
    return not left_batch and not right_batch


def _output_bytes(primitive: Primitive, avals: tuple[Any, ...], params: dict[str, Any]) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in _outputs(primitive, avals, params))


def _outputs(primitive: Primitive, avals: tuple[Any, ...], params: dict[str, Any]) -> Sequence[Any]:
    if _CALLED in params:  # a function with a gradient of its own: JAX has no rule for its shapes, its program has them
        return params[_CALLED].out_avals
    outputs, _ = primitive.abstract_eval(*avals, **params)
    return outputs if primitive.multiple_results else (outputs,)


def _operation_flops(primitive: Primitive, avals: tuple[Any, ...], params: dict[str, Any]) -> int:
    """FLOPs of one operation: matmuls by their shapes, kernels as if infinitely many, the rest one for each output element."""
    if primitive.name in KERNELS:
        return sys.maxsize
    if _CALLED in params:
        return _program_flops(params[_CALLED])
    shapes = [aval.shape for aval in _outputs(primitive, avals, params)]
    flops = matmul_flops(primitive.name, [aval.shape for aval in avals], shapes[0] if shapes else (), params)
    return sum(math.prod(shape) for shape in shapes) if flops is None else flops


def _program_flops(program: Any) -> int:
    """FLOPs of a program, its scans as often as they turn, its other loops once."""
    total = 0
    for equation in _jax.open_jaxpr(program)[0].eqns:
        if inner := list(_jax.inner_programs(equation)):
            flops = sum(map(_program_flops, inner))
        else:
            flops = _operation_flops(equation.primitive, tuple(atom.aval for atom in equation.invars), equation.params)
        total += flops * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total
