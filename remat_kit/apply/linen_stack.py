"""A stack of Linen blocks with a policy per segment of layers: `stack_module`.

In: a block's class, a number of layers, a plan. Out: a maker of modules with the parameters that `nn.scan` over the same block
has (`variable_axes={"params": 0}`, `split_rngs={"params": True}`), each `[L, …]`, whose layers are run by `remat_kit.stack`.
Random keys are split per layer in the same way whatever the plan. Other variables (batch statistics, caches, sown values) are
`[L, …]` too, and come out of a layer beside its outputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax.core.scope import CollectionFilter, subtract_filters

from remat_kit.apply.arguments import Constants, StaticArguments, join_arguments, split_arguments
from remat_kit.apply.segments import GroupOption
from remat_kit.apply.stack import flax_inputs, split_result, stack
from remat_kit.plans import Plan, StackPlan
from remat_kit.policy import Policy


class LinenStack(nn.Module):
    """Equal blocks, one after the other; made by `stack_module`.

    Attributes:
        make_block: Makes the block.
        num_layers: How many.
        plan: See `remat_kit.stack`, like the rest.
        rngs: Random streams that the blocks draw from.
        group: How `full` segments keep only some inputs.
        unroll: Layers per iteration of a loop.
        partition_name: What the axis of layers is called in `nn.Partitioned` parameters.
    """

    make_block: Callable[..., nn.Module]
    num_layers: int
    plan: Policy | StackPlan | Plan | str
    rngs: tuple[str, ...] = ("dropout",)
    group: GroupOption = None
    unroll: int = 1
    partition_name: str | None = None

    @nn.compact
    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the blocks.

        Args:
            x: What the first block gets.
            *args: What every block gets beside it. Values that are no arrays stay Python values.
            **kwargs: The same by name.

        Returns:
            What the last block returns; where blocks return a pair, with their second results stacked.

        Raises:
            StepError: The variables are those of another number of layers.
        """
        if self.is_initializing():
            return self._scan(x, args, kwargs)
        constants, leaves = split_arguments(args, kwargs, static=StaticArguments(), is_node=lambda _: False)
        assert self.scope is not None
        variables = nn.meta.unbox(dict(self.variables))
        params = variables.pop("params", {})
        layer = _Layer(
            block=self.make_block(parent=None),
            constants=constants,
            mutable=subtract_filters(self.scope.mutable, "params") or (),
        )
        carry, (outputs, written) = stack(
            layer,
            params,
            x,
            self.plan,
            xs=flax_inputs(params, variables, self.num_layers, self.name or type(self).__name__),
            consts=leaves,
            key={name: self.make_rng(name) for name in self.rngs if self.has_rng(name)},
            group=self.group,
            unroll=self.unroll,
        )
        for collection, values in written.items():
            for name, value in values.items():
                self.put_variable(collection, name, value)
        return (carry, outputs) if layer.has_outputs else carry

    def _scan(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the parameters, in the scope of this module."""
        block = self.make_block()
        nn.share_scope(self, block)
        has_outputs = False

        def layer(block: nn.Module, carry: Any, _: None) -> tuple[Any, Any]:
            nonlocal has_outputs
            has_outputs, carry, outputs = split_result(block(carry, *args, **kwargs), carry)
            return carry, outputs

        scan = nn.scan(
            layer,
            variable_axes={True: 0},  # all collections
            split_rngs=dict.fromkeys(("params", *self.rngs), True),
            length=self.num_layers,
            metadata_params={nn.PARTITION_NAME: self.partition_name},
        )
        carry, outputs = scan(block, x, None)
        return (carry, outputs) if has_outputs else carry


def stack_module(
    block_class: Callable[..., nn.Module],
    *,
    num_layers: int,
    plan: Policy | StackPlan | Plan | str,
    rngs: tuple[str, ...] = ("dropout",),
    group: GroupOption = None,
    unroll: int = 1,
    partition_name: str | None = None,
) -> Callable[..., LinenStack]:
    """Stacks Linen blocks under a plan, as `nn.scan` stacks them without one.

    Args:
        block_class: The block; called as `block(x, …)`, it returns the next `x`, or a pair of it and an output.
        num_layers: How many.
        plan: A policy per segment of layers; see `remat_kit.stack`, like `group` and `unroll`.
        rngs: Random streams that the blocks draw from, split per layer.
        group: How `full` segments keep only some inputs.
        unroll: Layers per iteration of a loop.
        partition_name: What the axis of layers is called in `nn.Partitioned` parameters.

    Returns:
        A function that takes the block's own arguments and a `name`, and makes the stack.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import linen as nn
        >>> layers = stack_module(nn.Dense, num_layers=4, plan="full*2 | none*2")(8)
        >>> jax.tree.map(jnp.shape, layers.init(jax.random.key(0), jnp.ones((2, 8)))["params"]["kernel"])
        (4, 8, 8)
    """

    def make(*args: Any, name: str | None = None, **kwargs: Any) -> LinenStack:
        return LinenStack(
            make_block=functools.partial(block_class, *args, **kwargs),
            num_layers=num_layers,
            plan=plan,
            rngs=rngs,
            group=group,
            unroll=unroll,
            partition_name=partition_name,
            name=name,
        )

    return make


@dataclass(eq=False, kw_only=True)
class _Layer:
    """A block of a stack as `stack` calls it; notes whether it has outputs.

    Attributes:
        block: The block, unbound.
        constants: What of the arguments stays Python.
        mutable: The collections that the block may write.
        has_outputs: Whether the block returns a pair.
    """

    block: nn.Module
    constants: Constants
    mutable: CollectionFilter
    has_outputs: bool = False

    @property
    def __name__(self) -> str:
        return type(self.block).__name__

    def __call__(
        self, params: Any, x: Any, *, consts: list[jax.Array], key: dict[str, jax.Array], xs: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, dict[str, Any]]]:
        args, kwargs = join_arguments(self.constants, consts)
        variables = {"params": params, **xs[0]}
        result, written = self.block.apply(variables, x, *args, rngs=key, mutable=self.mutable, **kwargs)
        self.has_outputs, carry, outputs = split_result(result, x)
        return carry, (outputs, dict(written))
