"""A layer as the planner sees it: its values, the operations that make them, what the backward pass reads of it. Plain data.

Bytes are of one layer on one device, FLOPs and seconds of its forward pass on one device. What no operation here makes
(parameters, constants, the block's input, which is always saved) is available for free: recomputation never leaves the
block. A name may stand for several values (a kernel's output and its statistics): a policy keeps all of them or none.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValue:
    """A value of a layer; its number is its position in `BlockGraph.values`.

    Attributes:
        num_bytes: Per layer and device, when it is kept.
        name: What a policy calls it; None = no policy can keep it.
        is_read: Whether the backward pass of the layer reads it.
    """

    num_bytes: int
    name: str | None = None
    is_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOp:
    """An operation of a layer's forward pass.

    Attributes:
        kind: What it is, for messages.
        inputs: Numbers of the values it reads.
        outputs: Numbers of the values it makes, all at once.
        flops: None = nobody knows: it then counts as more than the rest of the block together.
        seconds: On the target; None as for `flops`.
        is_replayable: False = recomputing it could change the result (routing, random state) or is not wanted (collectives).
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int | None
    seconds: float | None
    is_replayable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGraph:
    """One layer.

    Attributes:
        values: Position = number.
        ops: In an order in which they can run.
        input_bytes: Of what the layer gets from the one before; always saved.
        rule_names: Names that are written as a rule by kind (`kernels`), not as `save(name)`.
        input_names: Names of the layer's input itself: always kept, so no policy need speak of them.
        notes: What could not be told exactly.
    """

    values: tuple[BlockValue, ...]
    ops: tuple[BlockOp, ...]
    input_bytes: int = 0
    rule_names: tuple[str, ...] = ()
    input_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        made: set[int] = set()
        makers = {value for op in self.ops for value in op.outputs}
        for op in self.ops:
            assert not made.intersection(op.outputs), f"two operations make a value of {op.kind}"
            assert not (makers - made).intersection(op.inputs), f"{op.kind} reads a value before it is made"
            made.update(op.outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a policy can keep, once each, in order of appearance; inputs of the block have none."""
        made = {value for op in self.ops for value in op.outputs}
        found = (value.name for number, value in enumerate(self.values) if number in made)
        return tuple(dict.fromkeys(name for name in found if name is not None))

    def name_bytes(self, name: str) -> int:
        """Bytes of all values of a name, per layer and device."""
        return sum(value.num_bytes for value in self.values if value.name == name)

    def reads(self, name: str) -> bool:
        """Whether the backward pass of the layer reads a value of this name."""
        return any(value.is_read for value in self.values if value.name == name)

    @property
    def read_bytes(self) -> int:
        """Bytes that the layer keeps without rematerialization: its input and every value that the backward pass reads."""
        made = {value for op in self.ops for value in op.outputs}
        return self.input_bytes + sum(
            value.num_bytes for number, value in enumerate(self.values) if value.is_read and number in made
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """A value and its producer in one row, for blocks written by hand.

    Attributes:
        name: Its name.
        num_bytes: Per layer and device.
        flops, seconds: Of its producer; None = unknown.
        needs: Names that the producer reads; others than those of rows are inputs of the block.
        is_read: Whether the backward pass reads it.
        is_saveable: Whether a policy can keep it.
        never_replay: Whether its producer must not run again.
    """

    name: str
    num_bytes: int
    flops: int | None = 0
    seconds: float | None = 0.0
    needs: tuple[str, ...] = ()
    is_read: bool = True
    is_saveable: bool = True
    never_replay: bool = False


def block_of(rows: Iterable[ValueRow], *, input_bytes: int = 0) -> BlockGraph:
    """Makes a block of rows, each with one producer.

    Args:
        rows: In an order in which they can be computed.
        input_bytes: Of the block's input.
    """
    listed = tuple(rows)
    numbers = {row.name: number for number, row in enumerate(listed)}
    assert len(numbers) == len(listed), "two rows have one name"
    return BlockGraph(
        values=tuple(
            BlockValue(num_bytes=row.num_bytes, name=row.name if row.is_saveable else None, is_read=row.is_read) for row in listed
        ),
        ops=tuple(
            BlockOp(
                kind=row.name,
                inputs=tuple(numbers[need] for need in row.needs if need in numbers),
                outputs=(number,),
                flops=row.flops,
                seconds=row.seconds,
                is_replayable=not row.never_replay,
            )
            for number, row in enumerate(listed)
        ),
        input_bytes=input_bytes,
    )


def op_flops(block: BlockGraph) -> tuple[int, ...]:
    """FLOPs of each operation; an unpriced one counts as more than all priced ones together."""
    known = [op.flops for op in block.ops if op.flops is not None]
    return tuple(1 + 2 * sum(known) if op.flops is None else op.flops for op in block.ops)


def op_seconds(block: BlockGraph) -> tuple[float, ...]:
    """Seconds of each operation; an unpriced one counts as more than all priced ones together."""
    known = [op.seconds for op in block.ops if op.seconds is not None]
    return tuple((2 * sum(known) or 1.0) if op.seconds is None else op.seconds for op in block.ops)


def unpriced(block: BlockGraph) -> tuple[str, ...]:
    """Kinds of the operations whose price is not known, once each."""
    return tuple(dict.fromkeys(op.kind for op in block.ops if op.flops is None or op.seconds is None))
