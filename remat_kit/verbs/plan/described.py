"""What the worker process tells the planner about a step: plain data, without JAX."""

from dataclasses import dataclass

from remat_kit.planner.blocks import BlockGraph
from remat_kit.verbs.plan.roofline import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class StackBlocks:
    """A stack of a step.

    Attributes:
        name: What plans call it.
        num_layers: How many.
        accepts_mixed: Whether its layers may follow different policies.
        repeats: How often it runs in a step.
        forward_s: Of one layer, by the roofline.
        block: One layer.
        paths: Of its modules, first layer first, for a model that nobody edits; () = the step declares the stack.
    """

    name: str
    num_layers: int
    accepts_mixed: bool
    repeats: int
    forward_s: float
    block: BlockGraph
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlocks:
    """A step, as far as the planner needs to know it.

    Attributes:
        stacks: In forward order.
        knobs: Pairs of `batch`, `seq` or `depth` and the option of the factory that it is.
        options: Pairs of option and value in force, given or default, as texts.
        alternatives: Pairs of what a change of options does, in words, and the changed options.
        has_depth: Whether the depth option makes every stack so short.
        num_devices: Devices that the step runs on.
        flops: Of the step without rematerialization, per device.
        time: Its roofline; None = the target's rates are not known.
        program: Fingerprint of the step.
        notes: What could not be told exactly, and the factory's own notes.
    """

    stacks: tuple[StackBlocks, ...]
    knobs: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    alternatives: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    has_depth: bool
    num_devices: int
    flops: int
    time: StepTime | None
    program: str
    notes: tuple[str, ...] = ()
