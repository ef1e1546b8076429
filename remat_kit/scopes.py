"""The named scopes that our own loops open, and what a stack of scopes says of an operation's phase.

A loop with a derivative of its own carries none of JAX's marks, so it opens these scopes; the traced step and the compiled
program are both read by them. No JAX: scopes are texts in both.
"""

import re
from collections.abc import Iterable

FORWARD_SCOPE = "remat_kit.forward"
RECOMPUTE_SCOPE = "remat_kit.recompute"
BACKWARD_SCOPE = "remat_kit.backward"

_OURS = re.compile(r"remat_kit\.(forward|recompute|backward)")
_RULES = re.compile(r"(remat_kit\.(?:recompute|backward))\[([^]]*)]")


def with_rules(scope: str, rules: Iterable[object] | None) -> str:
    """A scope of ours with the policy written into it that decided what its operations read; None = there was none.

    Example:
        >>> with_rules(RECOMPUTE_SCOPE, ["save(*/c_fc)", "dots"])
        'remat_kit.recompute[save(*|c_fc)+dots]'
    """
    return scope if rules is None else f"{scope}[{'+'.join(map(str, rules)).replace('/', '|')}]"


def scoped_rules(scope: str) -> tuple[str, ...] | None:
    """The rules in the innermost scope that has some; None without.

    Example:
        >>> scoped_rules("remat_kit.backward/remat_kit.recompute[save(*|c_fc)+dots]")
        ('save(*/c_fc)', 'dots')
    """
    found = _RULES.findall(scope)
    return None if not found else tuple(filter(None, found[-1][1].replace("|", "/").split("+")))


def without_rules(scope: str) -> str:
    """The scopes without the policies in them, whose names are not what the operation is about."""
    return _RULES.sub(r"\1", scope)


def marked_phase(scope: str) -> str | None:
    """The phase that our scopes or JAX's `rematted_computation` mark; the innermost of ours wins.

    What a forward loop of ours does inside a region that is recomputed is recomputation.

    Args:
        scope: Scopes around an operation, outermost first, joined by `/`.

    Returns:
        `forward`, `recompute` or `backward`; None without a mark.

    Example:
        >>> marked_phase("transpose(jvp())/remat_kit.backward/jvp(remat_kit.recompute)")
        'recompute'
    """
    ours = _OURS.findall(scope)
    if ours and ours[-1] != "forward":
        return ours[-1]
    if "rematted_computation" in scope:
        return "recompute"
    return "forward" if ours else None
