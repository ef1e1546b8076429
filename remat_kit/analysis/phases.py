"""Forward, recompute, backward or update, from an operation's name in the compiled program.

JAX leaves its name stack in `op_name`: what `jax.checkpoint` recomputes stands under `rematted_computation`, the rest of the
differentiated region under `checkpoint`, what was differentiated under `jvp(…)`, what was transposed under `transpose(jvp(…))`.
Hand-made loops carry no such marks: ours open named scopes (`remat_kit.scopes`), the innermost of which wins.
"""

import re
from functools import lru_cache

from remat_kit.memory import StepPhase
from remat_kit.scopes import marked_phase

_CHECKPOINT = re.compile(r"(?<![\w.])checkpoint(?![\w.])")


@lru_cache(maxsize=65536)
def phase_of(op_name: str) -> StepPhase:
    """Tells the phase of an operation.

    Args:
        op_name: Its name stack, from the metadata of the instruction.

    Returns:
        Its phase; `update` for names without a mark, the empty one too.

    Example:
        >>> phase_of("jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/mlp/dot_general").value
        'recompute'
        >>> phase_of("jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/mlp/dot_general").value
        'backward'
        >>> phase_of("jit(step)/transpose(jvp(remat_kit.backward))/while/body/remat_kit.recompute/mlp/dot_general").value
        'recompute'
    """
    marked = marked_phase(op_name)
    if marked is not None:
        return StepPhase(marked)
    if "transpose(" in op_name:
        return StepPhase.BACKWARD
    if "jvp(" in op_name:  # of a region inside a region, the forward pass stands under `checkpoint` too
        return StepPhase.FORWARD
    return StepPhase.BACKWARD if _CHECKPOINT.search(op_name) else StepPhase.UPDATE
