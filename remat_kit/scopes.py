"""The named scopes that our own loops open, and what a stack of scopes says of an operation's phase.

A loop with a derivative of its own carries none of JAX's marks, so it opens these scopes; the traced step and the compiled
program are both read by them. No JAX: scopes are texts in both.
"""

import re

FORWARD_SCOPE = "remat_kit.forward"
RECOMPUTE_SCOPE = "remat_kit.recompute"
BACKWARD_SCOPE = "remat_kit.backward"

_OURS = re.compile(r"remat_kit\.(forward|recompute|backward)")


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
