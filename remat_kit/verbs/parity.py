"""`check_parity`: the same loss and gradients under several policies, run here, on the devices that JAX has.

A policy must not change what is computed; a compiler may (openxla/xla#46231: gradients of values offloaded inside a loop were
silently wrong on GPU). In: a function that builds the loss under a policy. Out: for each policy how far its results lie from the
first one's, against a bound by dtype. Not bitwise: XLA fuses differently, and keeps excess precision in one program and not in
the other (jax-ml/jax#8702).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit import _jax
from remat_kit.apply.checks import offloads
from remat_kit.apply.jaxprs import equations_of
from remat_kit.errors import PolicyError
from remat_kit.grammar import parse_plan

BOUNDS = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest difference over the largest entry of the tree that is held for rounding, by the coarsest dtype of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """One policy against the first one.

    Attributes:
        policy: As spelled.
        difference: Largest difference of an entry of loss or gradients, over the largest entry of the tree that holds it;
            infinite where one is finite and the other is not.
        bound: What it is held against.
        is_bitwise: Whether no entry differs.
    """

    policy: str
    difference: float
    bound: float
    is_bitwise: bool

    @property
    def agrees(self) -> bool:
        """Whether the difference can be rounding."""
        return self.difference <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """The answer of `check_parity`.

    Attributes:
        platform: Where it ran: cpu, gpu or tpu.
        reference: The policy that the others are held against.
        rows: One for each other policy, in the order asked for.
        notes: What a reader should know.
    """

    platform: str
    reference: str
    rows: tuple[Parity, ...]
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether all policies compute the same."""
        return all(row.agrees for row in self.rows)


def check_parity(loss: Callable[[str], Callable[..., Any]], *args: Any, policies: Sequence[str]) -> ParityReport:
    """Runs a loss and its gradients under several policies and compares them.

    Args:
        loss: Takes a policy's text, returns the loss under it: a function of `args` that returns a scalar.
        *args: Arrays or pytrees of them; gradients are those of the first.
        policies: At least two texts, such as `("none", "save(h)", "offload(h)")`; the first is the reference.

    Raises:
        PolicyError: Fewer than two policies, or a text that is none.

    Example:
        >>> import jax.numpy as jnp
        >>> from remat_kit import remat
        >>> report = check_parity(lambda policy: remat(lambda x: jnp.sin(x) ** 2, policy), 0.5, policies=("none", "full"))
        >>> report.agrees
        True
    """
    if isinstance(policies, str) or len(policies) < 2:
        raise PolicyError(f"{policies!r}: give at least two policies to compare, like ('none', 'save(h)', 'offload(h)').")
    plans = [parse_plan(text) for text in policies]
    has_offloads = any(offloads(policy) for plan in plans for policy in plan.policies)
    runs = [jax.jit(jax.value_and_grad(loss(text))) for text in policies]
    bound = max(_bound(run, args) for run in runs)
    reference, *others = [jax.device_get(run(*args)) for run in runs]
    rows = [_row(text, found, reference, bound) for text, found in zip(policies[1:], others, strict=True)]
    platform = jax.default_backend()
    return ParityReport(
        platform=platform, reference=policies[0], rows=tuple(rows), notes=_notes(platform, has_offloads=has_offloads)
    )


def _row(text: str, found: Any, reference: Any, bound: float) -> Parity:
    (value, gradients), (wanted, wanted_gradients) = found, reference
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True))
    difference = max(_difference(value, wanted), _difference(gradients, wanted_gradients))
    is_bitwise = all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)
    return Parity(policy=text, difference=difference, bound=bound, is_bitwise=is_bitwise)


def _difference(found: Any, wanted: Any) -> float:
    """Largest difference over the largest entry of the whole tree: a single parameter's true gradient may be 0."""
    pairs = [_in_float64(pair) for pair in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]
    scale = max((float(np.abs(other[np.isfinite(other)]).max(initial=0)) for _, other in pairs), default=0.0)
    largest = 0.0
    for one, other in pairs:
        finite = np.isfinite(one) & np.isfinite(other)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
            return float("inf")
        largest = max(largest, float(np.abs(one[finite] - other[finite]).max(initial=0)))
    return largest / scale if scale else largest


def _in_float64(pair: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    one, other = (_reals(np.asarray(leaf)) for leaf in pair)
    return one, other


def _reals(array: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(array):
        return np.stack([np.real(array), np.imag(array)]).astype(np.float64)
    return array.astype(np.float64)


def _bound(run: Callable[..., Any], args: tuple[Any, ...]) -> float:
    avals = [variable.aval for equation in equations_of(jax.make_jaxpr(run)(*args)) for variable in equation.outvars]
    dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)}
    return max((BOUNDS.get(dtype.name, float(jnp.finfo(dtype).eps)) for dtype in dtypes), default=0.0)


def _notes(platform: str, *, has_offloads: bool) -> tuple[str, ...]:
    notes = ["Not bitwise: programs that compute the same are fused, and so rounded, differently; the bound is by dtype."]
    if has_offloads and platform == "cpu":
        notes.append("CPU ignores the host memory: an offload that a GPU or TPU gets wrong agrees here.")
    if has_offloads and platform == "gpu" and _jax.GPU_OFFLOAD_FAULT is not None:
        notes.append(_jax.GPU_OFFLOAD_FAULT)
    return tuple(notes)
