"""`load_plan`: a plan file for a training loop, held against the installed versions and against the step it is used for."""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from remat_kit.errors import RematWarning
from remat_kit.plan_file import PlanFile, read_plan

if TYPE_CHECKING:
    from remat_kit.step import Step


def load_plan(path: str | os.PathLike[str], *, step: "Step | None" = None) -> PlanFile:
    """Reads a plan that `remat-kit plan --out` wrote.

    Args:
        path: Of the file, .toml or .json.
        step: The step that it is used for, built under any policy: it is traced, and held against the program that the plan was
            made for. None = not checked.

    Returns:
        The plan: its `policies` for a step factory, its `stack_plan` for `stack` and `remat`, its `wraps` for `rematerialize`.

    Raises:
        PolicyError: The file can't be read, or is no plan file.

    Warns:
        RematWarning: The plan was made with other versions, or for another program.

    Example:
        plan = remat_kit.load_plan("plan.toml")
        step = models.gpt2_small(plan.policies, jax.devices(), batch=8)
        remat_kit.load_plan("plan.toml", step=step)  # warns when it is not the step that was planned for
    """
    found = read_plan(Path(path))
    if step is not None:
        _warn_of_program(found, step, Path(path))
    return found


def _warn_of_program(found: PlanFile, step: "Step", path: Path) -> None:
    from remat_kit.trace import trace_graph
    from remat_kit.verbs.fingerprint import fingerprint_of

    here = fingerprint_of(step, trace_graph(step))
    if here != found.program:
        options = " ".join(f"{name}={value}" for name, value in found.options.items())
        warnings.warn(
            f"{path.name} was planned for {f'{found.step} {options}'.strip()} on {found.target}: this step has other arguments, "
            "layers, devices or named values. Plan again for it.",
            RematWarning,
            stacklevel=3,
        )
