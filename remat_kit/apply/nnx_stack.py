"""A stack of NNX blocks with a policy per segment of layers: `NnxStack`.

In: what makes a block, a number of layers, a plan. Out: a module that holds the blocks as one, every variable `[L, …]` as
`nnx.vmap` makes them, and runs them by `remat_kit.stack`. Each layer has its own random streams, statistics and caches; what a
block writes to them is there afterwards, whatever the plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from remat_kit.apply.arguments import Constants, StaticArguments, join_arguments, split_arguments
from remat_kit.apply.nnx import variables_of
from remat_kit.apply.segments import GroupOption
from remat_kit.apply.stack import as_stack_plan, flax_inputs, split_result, stack
from remat_kit.errors import ApplyError, StepError
from remat_kit.plans import Plan, StackPlan
from remat_kit.policy import Policy


class NnxStack(nnx.Module):
    """Equal blocks, one after the other.

    Attributes:
        layers: The blocks as one module, each of its variables `[L, …]`.
        num_layers: How many.
        plan: See `remat_kit.stack`, like the rest.
        group: How `full` segments keep only some inputs.
        unroll: Layers per iteration of a loop.

    Example:
        >>> import jax.numpy as jnp
        >>> layers = NnxStack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), num_layers=4, plan="full*2 | none*2", rngs=nnx.Rngs(0))
        >>> layers.layers.kernel.shape, layers(jnp.ones((2, 8))).shape
        ((4, 8, 8), (2, 8))
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        *,
        num_layers: int,
        plan: Policy | StackPlan | Plan | str,
        rngs: nnx.Rngs,
        group: GroupOption = None,
        unroll: int = 1,
        partition_name: str | None = None,
    ) -> None:
        """Makes the blocks.

        Args:
            make_block: Makes a block from its random streams; called as `block(x, …)`, it returns the next `x`, or a pair of it
                and an output.
            num_layers: How many.
            plan: A policy per segment of layers; see `remat_kit.stack`, like `group` and `unroll`.
            rngs: Random streams, split per layer.
            group: How `full` segments keep only some inputs.
            unroll: Layers per iteration of a loop.
            partition_name: What the axis of layers is called in the sharding of parameters.

        Raises:
            StepError: There is no layer.
            PolicyError: The plan does not fit.
        """
        if num_layers < 1:
            raise StepError(f"num_layers={num_layers}: a stack has at least 1 layer.")
        as_stack_plan(plan).fit(num_layers)
        make = nnx.vmap(make_block, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: partition_name})
        self.layers = nnx.split_rngs(splits=num_layers)(make)(rngs)
        self.num_layers, self.plan, self.group, self.unroll = num_layers, plan, group, unroll

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the blocks.

        Args:
            x: What the first block gets.
            *args: What every block gets beside it. Values that are no arrays stay Python values.
            **kwargs: The same by name.

        Returns:
            What the last block returns; where blocks return a pair, with their second results stacked.

        Raises:
            ApplyError: A block adds variables when it is called.
            StepError: The variables are those of another number of layers.
        """
        constants, leaves = split_arguments(args, kwargs, static=StaticArguments(), is_node=lambda _: False)
        graphdef, params, others = nnx.split(self.layers, nnx.Param, ...)
        layer = _Layer(block_name=type(self.layers).__name__, graphdef=graphdef, constants=constants)
        xs = flax_inputs(params, others, self.num_layers, type(self).__name__)
        options = {"xs": xs, "consts": leaves, "group": self.group, "unroll": self.unroll}
        carry, (outputs, written) = stack(layer, params, x, self.plan, **options)
        variables = variables_of(self.layers)
        for position, value in zip(layer.written, written, strict=True):
            variables[position].set_value(value)
        return (carry, outputs) if layer.has_outputs else carry


@dataclass(eq=False, kw_only=True)
class _Layer:
    """A block of a stack as `stack` calls it; notes whether it has outputs, and which variables it writes.

    Attributes:
        block_name: What warnings call the block.
        graphdef: Structure of the block.
        constants: What of the arguments stays Python.
        has_outputs: Whether the block returns a pair.
        written: Positions, among the block's variables, of those that it writes.
    """

    block_name: str
    graphdef: Any
    constants: Constants
    has_outputs: bool = False
    written: list[int] = field(default_factory=list)

    @property
    def __name__(self) -> str:
        return self.block_name

    def __call__(self, params: Any, x: Any, *, xs: Any, consts: list[jax.Array]) -> tuple[Any, tuple[Any, list[Any]]]:
        block = nnx.merge(self.graphdef, params, xs[0])
        variables = variables_of(block)
        before = [variable.get_raw_value() for variable in variables]
        args, kwargs = join_arguments(self.constants, consts)
        self.has_outputs, carry, outputs = split_result(block(x, *args, **kwargs), x)
        _check_variables(block, variables)
        after = [variable.get_raw_value() for variable in variables]
        self.written = [position for position, value in enumerate(after) if value is not before[position]]
        return carry, (outputs, [after[position] for position in self.written])


def _check_variables(block: nnx.Module, variables: list[nnx.Variable]) -> None:
    known = {id(variable) for variable in variables}
    added = [path for path, node in nnx.iter_graph(block, graph=True) if isinstance(node, nnx.Variable) and id(node) not in known]
    if added:
        raise ApplyError(
            f"{type(block).__name__} adds the variable {'/'.join(map(str, added[0]))!r} when it is called, and layers of a stack "
            "keep the variables they were made with: make it in the block's __init__, or return the value as a second result."
        )
