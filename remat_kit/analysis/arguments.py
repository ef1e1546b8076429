"""The arguments of a compiled step: path, role, shape on one device and shape over all of them.

In: `HloModule`, whose entry parameters carry the argument's path in `op_name` (`state['params']['layers']['q']`), and
optionally what the step says of its roles. Out: `Argument`. Without roles, the words of the path decide.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from remat_kit.analysis.hlo import HloModule, Instruction, attribute
from remat_kit.analysis.shapes import ArrayShape, arrays_of
from remat_kit.memory import PeakKind

_OPTIMIZER_WORDS = frozenset(
    "mu nu opt_state optimizer_state optimizer opt momentum velocity ema trace count m_tree v_tree".split()
)
_PARAMETER_WORDS = frozenset("params param parameters weights model ws".split())
_BATCH_WORDS = frozenset("batch tokens inputs targets labels images input_ids ids mask positions segment_ids tok".split())
_KIND_OF_WORDS = (
    (_OPTIMIZER_WORDS, PeakKind.OPTIMIZER_STATE),
    (_PARAMETER_WORDS, PeakKind.PARAMETERS),
    (_BATCH_WORDS, PeakKind.BATCH),
)
_ROLES = {
    "parameters": PeakKind.PARAMETERS,
    "optimizer_state": PeakKind.OPTIMIZER_STATE,
    "batch": PeakKind.BATCH,
    "other": PeakKind.OTHER_ARGUMENTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An array that the step takes.

    Attributes:
        number: Of the entry parameter.
        path: As the program spells it.
        kind: Parameters, optimizer state, batch, or other.
        local: Shape on one device.
        global_dims: Dimensions over all devices.
    """

    number: int
    path: str
    kind: PeakKind
    local: ArrayShape
    global_dims: tuple[int, ...]


def arguments_of(module: HloModule, roles: Mapping[str, str] | None = None) -> tuple[Argument, ...]:
    """Reads the arguments of a step.

    Args:
        module: Its compiled program.
        roles: Path of an argument -> its role in the step (`remat_kit.step.ARGUMENT_ROLES`).

    Returns:
        Arguments by number.
    """
    entry = module.computations[module.entry]
    found = [_argument(each, roles or {}, module.donated) for each in entry.instructions if each.opcode == "parameter"]
    return tuple(sorted(found, key=lambda argument: argument.number))


def _argument(instruction: Instruction, roles: Mapping[str, str], donated: frozenset[int]) -> Argument:
    is_donated = int(instruction.literal) in donated or not donated
    path = instruction.op_name or instruction.name
    arrays = arrays_of(instruction.shape)
    local = arrays[0] if arrays else ArrayShape(dtype="opaque", dims=())
    role = roles.get(path)
    return Argument(
        number=int(instruction.literal),
        path=path,
        kind=_ROLES[role] if role else kind_of_path(path, is_donated=is_donated),
        local=local,
        global_dims=_global_dims(local.dims, attribute(instruction, "sharding") or ""),
    )


def kind_of_path(path: str, *, is_donated: bool) -> PeakKind:
    """Guesses an argument's role from the first telling word of its path; without one, what is donated is parameters.

    Args:
        path: As the program spells it.
        is_donated: Whether a result reuses its memory (or the program donates nothing).

    Returns:
        Parameters, optimizer state or batch.

    Example:
        >>> kind_of_path("st[1][0].nu['layers']['up']", is_donated=True).value
        'optimizer state'
        >>> kind_of_path("batch['tokens']", is_donated=False).value
        'batch'
    """
    words = re.findall(r"[A-Za-z_]\w*", path.lower())
    for word in words:
        for allowed, kind in _KIND_OF_WORDS:
            if word in allowed:
                return kind
    return PeakKind.PARAMETERS if is_donated else PeakKind.BATCH


def _global_dims(dims: tuple[int, ...], sharding: str) -> tuple[int, ...]:
    tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
    if tiles is None:
        return dims
    factors = [int(part) for part in tiles[1].split(",")][: len(dims)]
    return tuple(dim * factor for dim, factor in zip(dims, factors, strict=False))


def same_dims(left: Iterable[int], right: Iterable[int]) -> bool:
    """Whether two shapes hold the same dimensions, whatever their order, ones left out (layouts transpose, layers add a one)."""
    return sorted(dim for dim in left if dim != 1) == sorted(dim for dim in right if dim != 1)


@lru_cache(maxsize=8192)
def forms_of(argument: Argument) -> tuple[tuple[int, ...], ...]:
    """Shapes under which an argument, its gradient or a copy appears: whole and one layer of it, over all devices and on one."""
    whole = (argument.global_dims, argument.local.dims)
    return tuple(dict.fromkeys(form for dims in whole for form in (dims, dims[1:]) if len([dim for dim in form if dim != 1]) > 0))
