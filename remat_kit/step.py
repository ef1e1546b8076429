"""The step contract: what a factory returns, so that a training step can be compiled under any policy for any target.

A factory is `f(policies, devices, **options) -> Step`, named `module:function` on the command line. It is handed `policies`
(`policies["layers"]` is the `StackPlan` of that stack, to be given to `remat_kit.remat`) and the target's devices, and owns its
mesh. A complete one:

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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise StepError(f"a Stack needs a name, like Stack(name='layers', num_layers=12), not {self.name!r}.")
        if not isinstance(self.num_layers, int) or self.num_layers < 1:
            raise StepError(f"stack {self.name!r}: num_layers={self.num_layers!r} must be a whole number of at least 1.")


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
class Alternative:
    """Other options of the factory that need less memory: tried when no plan fits.

    Attributes:
        text: What they do, as a person would say it: `the loss in chunks of 64 tokens`.
        options: Options that differ, and their values as texts.
    """

    text: str
    options: Mapping[str, str]


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
        alternatives: What else could make the step fit.
        init: Optional: PRNG key -> real `args`, to run the step.
        notes: What the factory chose by itself and a reader should know, such as which attention runs.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    roles: Any = ()
    stacks: tuple[Stack, ...] = ()
    knobs: Knobs = Knobs()
    alternatives: tuple[Alternative, ...] = ()
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

    @classmethod
    def from_jit(
        cls,
        jitted: Any,
        *args: Any,
        stacks: tuple[Stack, ...] = (),
        roles: Any = (),
        knobs: Knobs = Knobs(),
    ) -> "Step":
        """Wraps a training step that is already jitted; donation and static arguments are taken from it.

        Args:
            jitted: What `jax.jit` returned.
            *args: What it is called with: arrays or `jax.ShapeDtypeStruct`s, and its static arguments.
            stacks: See `Step`; without any, only the policy `none` can be asked for.
            roles: See `Step`, for the arguments that are not static.
            knobs: See `Step`.

        Raises:
            StepError: `jitted` is not a jitted function.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> step = Step.from_jit(jax.jit(jnp.add, donate_argnums=0), jnp.ones(3), jnp.ones(3))
            >>> step.donate
            (0,)
        """
        if not hasattr(jitted, "trace"):
            raise StepError(
                f"from_jit takes what jax.jit returned, not {type(jitted).__name__}: wrap it as jax.jit(step, donate_argnums=0)."
            )
        abstract = tuple(jax.tree.map(_abstract, argument) for argument in args)
        infos = jitted.trace(*abstract).args_info[0]
        dynamic = tuple(
            position for position, argument in enumerate(abstract) if len(infos) == len(args) or _has_arrays(argument)
        )
        donate = tuple(number for number, info in enumerate(infos) if any(leaf.donated for leaf in jax.tree.leaves(info)))

        def call(*given: Any) -> Any:
            by_position = dict(zip(dynamic, given, strict=True))
            return jitted(*(by_position.get(position, argument) for position, argument in enumerate(abstract)))

        taken = tuple(abstract[position] for position in dynamic)
        return cls(fn=call, args=taken, donate=donate, stacks=stacks, roles=roles, knobs=knobs)


def _abstract(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    meshed = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
    kept = sharding if isinstance(leaf, jax.ShapeDtypeStruct) else meshed
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kept)


def _has_arrays(argument: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(argument))
