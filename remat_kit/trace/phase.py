"""Forward, recompute or backward, from the named scopes and transformations around an operation.

JAX puts what differentiation transposed under `transpose(…)`, and in there what `jax.checkpoint` recomputes under the scope
`rematted_computation`. That a checkpoint equation is `differentiated` says nothing: inside another region the forward pass has
such equations too. Hand-made loops carry neither mark: ours open the scopes below, and those win. What a forward loop of ours
does inside an outer recomputed region is recomputation.
"""

import re

from remat_kit.graph import Phase

FORWARD_SCOPE = "remat_kit.forward"
RECOMPUTE_SCOPE = "remat_kit.recompute"
BACKWARD_SCOPE = "remat_kit.backward"

_OURS = re.compile(r"remat_kit\.(forward|recompute|backward)")


def phase_of(scope: str) -> Phase:
    """Tells the phase of an operation.

    Args:
        scope: Scopes around it, outermost first, joined by `/`.

    Returns:
        Its phase.

    Example:
        >>> phase_of("transpose(jvp())/rematted_computation/dot").value
        'recompute'
        >>> phase_of("transpose(jvp())/remat_kit.backward/jvp(remat_kit.recompute)").value
        'recompute'
    """
    ours = _OURS.findall(scope)
    if ours and ours[-1] != "forward":
        return Phase(ours[-1])
    if "rematted_computation" in scope:
        return Phase.RECOMPUTE
    if ours:
        return Phase.FORWARD
    return Phase.BACKWARD if "transpose(" in scope else Phase.FORWARD
