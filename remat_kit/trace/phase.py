"""Forward, recompute or backward, from the named scopes and transformations around an operation.

JAX puts what differentiation transposed under `transpose(…)`, and in there what `jax.checkpoint` recomputes under the scope
`rematted_computation`. That a checkpoint equation is `differentiated` says nothing: inside another region the forward pass has
such equations too. Hand-made loops carry neither mark: ours open scopes (`remat_kit.scopes`), and those win.
"""

from remat_kit.graph import Phase
from remat_kit.scopes import marked_phase


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
    marked = marked_phase(scope)
    if marked is not None:
        return Phase(marked)
    return Phase.BACKWARD if "transpose(" in scope else Phase.FORWARD
