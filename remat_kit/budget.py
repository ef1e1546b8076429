"""Memory budgets: how many bytes of a device a step may take, and where that number comes from.

In: what a user wrote (`16GiB`, `90%`, nothing) and a target. Out: whole bytes, or None where a target has no memory of its own.
"""

from dataclasses import dataclass

from remat_kit.errors import BudgetError
from remat_kit.targets import Target
from remat_kit.units import parse_bytes

LEAST_UNITLESS = 2**10
"""Bytes from which on a number without a unit is believed: no device's memory is counted in fewer."""
DEFAULT_MEMORY_FRACTION = 0.75
"""Part of a GPU's memory that JAX reserves (`XLA_PYTHON_CLIENT_MEM_FRACTION`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much memory a step may take on each device; with neither field set, the target's default.

    Attributes:
        memory_bytes: The same on every target.
        fraction: Part of the device's memory, above 0 and at most 1.
    """

    memory_bytes: int | None = None
    fraction: float | None = None


def parse_budget(text: str | int | None) -> Budget:
    """Reads a budget.

    Args:
        text: An amount of memory (`16GiB`, bytes), a part of the device's memory (`90%`), or None.

    Raises:
        BudgetError: It is neither, or not above 0, or above 100%, or a number without a unit that must have meant one.

    Example:
        >>> parse_budget("90%").fraction, parse_budget("16GiB").memory_bytes
        (0.9, 17179869184)
    """
    if text is None:
        return Budget()
    written = str(text).strip()
    if written.endswith("%"):
        return Budget(fraction=parse_fraction(written))
    num_bytes = parse_bytes(written)
    if num_bytes <= 0:
        raise BudgetError(f"a budget of {written!r} holds nothing: give more than 0 bytes.")
    if written.isdecimal() and num_bytes < LEAST_UNITLESS:
        raise BudgetError(f"a budget of {written!r} is {num_bytes} bytes: write the unit, like {written}GiB.")
    return Budget(memory_bytes=num_bytes)


def parse_fraction(text: str | float) -> float:
    """Reads a part of a whole: `90%` or `0.9`.

    Raises:
        BudgetError: It is not above 0 and at most 1.
    """
    written = str(text).strip()
    try:
        fraction = float(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
    except ValueError:
        raise BudgetError(f"{written!r} is not a part of the memory; write it like 90% or 0.9.") from None
    if not 0 < fraction <= 1:
        raise BudgetError(f"{written!r} is not a part of the memory: above 0 and at most 100%.")
    return fraction


def budget_bytes(budget: Budget, target: Target, *, memory_fraction: float = DEFAULT_MEMORY_FRACTION) -> int | None:
    """The budget on a target, in bytes per device.

    The default is what a TPU's compiler accepts, `memory_fraction` of a GPU's memory, and none on CPU.

    Raises:
        BudgetError: A part of the memory of a target whose memory is not known.
    """
    if budget.memory_bytes is not None:
        return budget.memory_bytes
    if target.memory_bytes is None:
        if budget.fraction is not None:
            raise BudgetError(f"target {target.text!r} has no memory of its own to take {budget.fraction:.0%} of: give bytes.")
        return None
    default = 1.0 if target.platform == "tpu" else memory_fraction
    return int(target.memory_bytes * (default if budget.fraction is None else budget.fraction))
