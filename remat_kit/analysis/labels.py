"""Labels of buffers, what they are judged by, and the words for operations.

`classify` makes labels; `attribution` adds them up.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remat_kit.analysis.arguments import Argument
from remat_kit.analysis.dataflow import Dataflow
from remat_kit.analysis.stacks import LAYER_INPUTS, Stack
from remat_kit.graph import Residual
from remat_kit.memory import PeakKind

_WRAPPER = ".remat"
_NUMBER_PART = re.compile(r"(?<![^/'\[])\d+(?![^/'\]])")
_NUMBER_ENDING = re.compile(r"_\d+(?=$|[/'\]])")
_DROPPED = re.compile(
    r"^(?:jit|pjit|xla_call|core_call|remat|vmap|custom_jvp_call|custom_vjp_call)\(.*\)$|^(?:while|body|cond|closed_call|checkpoint|"
    r"rematted_computation|eval_jaxpr|branch_\d+_fun|shard_map|custom_vjp_call|custom_jvp_call|jvp\(\)|transpose\(jvp\(\)\)|remat_kit\.\w+)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a buffer holds.

    Attributes:
        kind: The class.
        name: Which of it.
        layers: Layers stacked in it.
        op_name: The program's words.
        source: `file:line`.
        certainty: How strong the evidence is: of several names for one buffer the most certain wins.
        stack: For a stack, or a copy or cast of a whole one: which stack.
        is_copy: Whether it is a copy. Where the stack itself is dead, the copy is it.
        residual: What the trace calls a residual that no loop stacks; None = unknown.
        logical_bytes: Of a copy in another element type: those of the stack itself. None = the buffer's own.
    """

    kind: PeakKind
    name: str
    layers: int = 1
    op_name: str = ""
    source: str = ""
    certainty: int = 0
    stack: str = ""
    is_copy: bool = False
    residual: Residual | None = None
    logical_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of the program.

    Attributes:
        flow: Indices of the module.
        arguments: Its arguments.
        stacks: What its loops stack.
        residuals: What the trace says is kept.
        vocabulary: Sizes of vocabularies: dimensions that only embeddings and output heads have.
    """

    flow: Dataflow
    arguments: tuple[Argument, ...]
    stacks: Mapping[tuple[str, int], Stack]
    residuals: Sequence[Residual]
    vocabulary: frozenset[int]


def vocabulary_of(arguments: Sequence[Argument]) -> frozenset[int]:
    """Dimensions of two-dimensional weights that are larger than the other one and that no stacked weight and no batch has."""
    weights = [each for each in arguments if each.kind is PeakKind.PARAMETERS]
    inner = {dim for each in weights if len(each.global_dims) > 2 for dim in each.global_dims}
    named = [each for each in weights if len(each.global_dims) == 2 and max(each.global_dims) >= 512]
    large = {dim for each in named for dims in (each.global_dims, each.local.dims) for dim in dims if dim == max(dims)}
    words = re.compile(r"emb|head|wte|vocab|unembed|logits", re.IGNORECASE)
    sure = {dim for each in named if words.search(each.path) for dim in (max(each.global_dims), max(each.local.dims))}
    batches = [each for each in arguments if each.kind is PeakKind.BATCH]
    tokens = {math.prod(each.local.dims) for each in batches}  # and the lengths of learned positions
    tokens |= {dim for each in batches for dim in (*each.local.dims, *each.global_dims)}
    return frozenset((large - inner - tokens) & sure)


def layer_patterns(names: Iterable[str]) -> dict[str, str]:
    """Each name with a star for the number of its layer, so that layers that are modules of their own share a name.

    A number is a layer's when it is a part of a path by itself, or ends a part and has three values at least (`block_0`,
    `block_1`, `block_2`, but not `ln_1`, `ln_2`).

    Example:
        >>> layer_patterns(["h/0/ln_1/mul", "h/1/ln_1/mul", "h/1/ln_2/mul"])["h/1/ln_2/mul"]
        'h/*/ln_2/mul'
    """
    paths = {name: _NUMBER_PART.sub("*", name) for name in names}
    endings: dict[str, set[str]] = {}
    for path in paths.values():
        endings.setdefault(_NUMBER_ENDING.sub("_*", path), set()).add(path)
    wide = {pattern for pattern, variants in endings.items() if len(variants) > 2}
    starred = {path: _NUMBER_ENDING.sub("_*", path) for path in paths.values()}
    return {name: starred[path] if starred[path] in wide else path for name, path in paths.items()}


def residual_name(residual: Residual | None, op_name: str) -> str:
    """What to call a residual: its names, or the operation that made it."""
    if residual is None:
        return short_name(op_name)
    if residual.names:
        return "+".join(residual.names)
    return LAYER_INPUTS if residual.kind == "loop_carry" else short_name(op_name) or residual.kind


def short_name(op_name: str) -> str:
    """An operation's name without the transformations, loops and rematerializing wrappers around it.

    Example:
        >>> short_name("jit(step)/transpose(jvp(head))/while/body/closed_call/checkpoint/mlp/dot_general")
        'head/mlp/dot_general'
        >>> short_name("jit(step)/jvp(Model)/h/0/checkpoint/0.remat/0/mlp/dot_general")
        'Model/h/0/mlp/dot_general'
    """
    words: list[str] = []
    wrapped = ""  # a module in its wrapper comes three times: h/0, 0.remat, 0
    for part in op_name.split("/"):
        if _DROPPED.match(part):
            continue
        inner = re.match(r"^(?:transpose\(|jvp\(|vmap\()+([^()]*)\)+$", part)
        word = inner[1] if inner else part
        if word.endswith(_WRAPPER):
            wrapped = word.removesuffix(_WRAPPER)
            word = "" if words and words[-1].split(".")[-1] == wrapped else wrapped
        elif word == wrapped:
            word, wrapped = "", ""
        if word:
            words.append(word)
    return "/".join(words)
