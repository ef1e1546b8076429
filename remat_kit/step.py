"""The step contract: what a factory returns, so that a training step can be compiled under any policy for any target.

A factory is `f(policies, devices, **options) -> Step`, named `module:function` on the command line. It is handed `policies`
(`policies["layers"]` is the `StackPlan` of that stack, to be given to `remat_kit.remat`) and the target's devices, and owns its mesh.
A complete one:

    def step(policies, devices, *, batch: int = 8, depth: int = 4) -> Step:
        block = remat(my_block, policies["layers"], prevent_cse=False)
        def train_step(params, x_BD):
            def loss(params):
                return jax.lax.scan(lambda x, p: (block(x, p), None), x_BD, params)[0].mean()
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))
        args = (jax.ShapeDtypeStruct((depth, 64, 64), "float32"), jax.ShapeDtypeStruct((batch, 64), "float32"))
        return Step(fn=train_step, args=args, donate=(0,), roles=("parameters", "batch"),
                    stacks=(Stack(name="layers", num_layers=depth),), knobs=Knobs(batch="batch", depth="depth"))
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from remat_kit.errors import StepError

ARGUMENT_ROLES = ("parameters", "optimizer_state", "batch", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A run of equal layers that takes a plan.

    Attributes:
        name: What plans call it.
        num_layers: How many layers.
        accepts_mixed: Whether its layers may follow different policies (the factory applies it with `remat_kit.stack`).
        roles: Role (see `remat_kit.presets.Role`) -> the names of the values that play it, () = the model has no such part.
    """

    name: str
    num_layers: int
    accepts_mixed: bool = False
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Which options of the factory mean what; None = there is no such option.

    Attributes:
        batch: Option with the global number of sequences or images.
        seq: Option with the tokens of a sequence.
        depth: Option with the number of layers.
    """

    batch: str | None = None
    seq: str | None = None
    depth: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step, ready to be traced.

    Attributes:
        fn: Pure function of `args`: the whole step, forward, backward and update.
        args: Abstract arguments: pytrees of `jax.ShapeDtypeStruct`, with shardings when there is more than one device.
        donate: Positions in `args` whose memory the outputs may reuse.
        roles: A pytree prefix of `args` with leaves out of `ARGUMENT_ROLES`.
        stacks: The stacks that plans speak of.
        knobs: Which options are batch, sequence and depth.
        init: Optional: PRNG key -> real `args`, to run the step.
        notes: What the factory chose by itself and a reader should know, such as which attention runs.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    roles: Any = ()
    stacks: tuple[Stack, ...] = ()
    knobs: Knobs = Knobs()
    init: Callable[[Any], tuple[Any, ...]] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(not 0 <= position < len(self.args) for position in self.donate):
            raise StepError(f"donate={self.donate} names an argument that is not there: the step has {len(self.args)}.")
        unknown = {leaf for leaf in jax.tree.leaves(self.roles) if leaf not in ARGUMENT_ROLES}
        if unknown:
            raise StepError(f"roles has {sorted(map(str, unknown))}; allowed are {', '.join(ARGUMENT_ROLES)}.")
        names = [stack.name for stack in self.stacks]
        if len(set(names)) < len(names):
            raise StepError(f"two stacks have one name: {', '.join(names)}.")
