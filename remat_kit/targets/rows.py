"""Rows of targets: one device kind each, read from TOML, ours and the user's.

A table's name is the kind, its keys are the fields of `TargetRow` and of the platform's chip record, flat. A user's row may say
`base = "h100"` and give only what differs. Anything unknown, missing or of the wrong type is an error that names the key.
"""

import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import msgspec

from remat_kit.errors import TargetError, nearest

Platform: TypeAlias = Literal["cpu", "cuda", "tpu"]
OptionValue: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChip:
    """What XLA's GPU compiler wants to know of a device that is not there. Per device.

    Attributes:
        compute_capability: Major and minor.
        num_cores: Streaming multiprocessors.
        fpus_per_core: f32 units of one of them.
        threads_per_core: Threads that one holds.
        shared_memory_per_core_bytes: Shared memory of one.
        shared_memory_per_block_bytes: The most that a block can ask for.
        l2_cache_bytes: Second-level cache.
        clock_ghz: Boost clock.
    """

    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_bytes: int
    l2_cache_bytes: int
    clock_ghz: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuChip:
    """How libtpu names a generation and which slices it has.

    Attributes:
        compiler_name: libtpu's name of the generation.
        chip_config: libtpu's chip configuration, None = its default.
        topology_rank: Numbers in a topology.
        devices_per_chip: JAX devices on a chip.
        max_chips: Chips of the largest slice.
    """

    compiler_name: str
    chip_config: str | None = None
    topology_rank: int
    devices_per_chip: int
    max_chips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """Facts of one device kind, per JAX device.

    Attributes:
        kind: What users call it.
        platform: Which compiler.
        device_kind: What JAX calls it.
        memory_bytes: Of a GPU, all of it; of a TPU, what its compiler accepts; None = no limit of its own.
        flops_per_s: Dense 16-bit matmul peak; None = unknown.
        memory_bytes_per_s: Memory bandwidth.
        host_bytes_per_s: Host link, one way; None = unknown.
        link_bytes_per_s: What a device sends to others of its host (GPU) or slice (TPU), all its links together; None = unknown.
        price_per_hour: What an hour of one device costs, in any currency; None = unknown. Our rows have none.
        dtypes: Floating-point dtypes that it multiplies.
        kernels: Custom kernels that run on it.
        compiler_options: Options that every compile for it gets.
        gpu, tpu: What the compiler of that platform wants to know.
        source: Where the numbers come from.
    """

    kind: str
    platform: Platform
    device_kind: str
    memory_bytes: int | None = None
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    price_per_hour: float | None = None
    dtypes: tuple[str, ...]
    kernels: tuple[str, ...] = ()
    compiler_options: tuple[tuple[str, OptionValue], ...] = ()
    gpu: GpuChip | None = None
    tpu: TpuChip | None = None
    source: str


Rows: TypeAlias = Mapping[str, TargetRow]

_CHIPS: Mapping[str, tuple[str, type[GpuChip] | type[TpuChip] | None]] = {
    "cpu": ("", None),
    "cuda": ("gpu", GpuChip),
    "tpu": ("tpu", TpuChip),
}
_KIND = re.compile(r"[a-z0-9][a-z0-9._-]*")
_RESERVED = "attached"
_OR_BASE = 'Or give base = "…" and only what differs.'


def load_rows(path: str | Path | None = None) -> Rows:
    """Loads our rows, and the user's on top.

    Args:
        path: A TOML file of more rows; None = only ours.

    Returns:
        Kind -> row, ours first.

    Raises:
        TargetError: The file can't be read, or a row in it is wrong.
    """
    ours = _our_tables()
    tables = dict(ours)
    rows = dict(_our_rows())
    for kind, table in {} if path is None else _read(Path(path)).items():
        where = f"{path}, [{kind}]"
        tables[kind] = _with_base(table, tables, where=where)
        rows[kind] = _row(kind, tables[kind], where=where)
    return MappingProxyType(rows)


@functools.cache
def _our_tables() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("remat_kit.targets").joinpath("rows.toml").read_text())


@functools.cache
def _our_rows() -> Rows:
    return {kind: _row(kind, table, where=f"rows.toml, [{kind}]") for kind, table in _our_tables().items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise TargetError(f"can't read the targets in {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{path} is not TOML: {error}.") from None


def _with_base(table: object, tables: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise TargetError(f'{where} is not a table: write [kind], and below it keys like base = "h100".')
    if "base" not in table:
        return table
    base = table["base"]
    if not isinstance(base, str) or base not in tables:
        raise TargetError(f"{where}: base = {base!r} is no target. There are {', '.join(tables)}.{nearest(str(base), tables)}")
    return {**tables[base], **{key: value for key, value in table.items() if key != "base"}}


def _row(kind: str, table: Mapping[str, Any], *, where: str) -> TargetRow:
    if not _KIND.fullmatch(kind) or kind == _RESERVED:
        raise TargetError(f"{where}: name a target with small letters, digits, '.', '_' and '-', and not {_RESERVED!r}.")
    platform = table.get("platform")
    if not isinstance(platform, str) or platform not in _CHIPS:
        raise TargetError(f"{where}: platform = {platform!r}; allowed are cpu, cuda and tpu. {_OR_BASE}")
    chip_field, chip_type = _CHIPS[platform]
    own = _fields(TargetRow) - {"kind", "gpu", "tpu"}
    of_chip = set() if chip_type is None else _fields(chip_type)
    allowed = sorted(own | of_chip)
    for key in table:
        if key not in allowed:
            raise TargetError(f"{where}: unknown key {key!r}.{nearest(key, allowed)} Keys: {', '.join(allowed)}.")
    data = {key: table[key] for key in table if key in own} | {"kind": kind}
    data["compiler_options"] = tuple(_options(data, where=where).items())
    if chip_type is not None:
        data[chip_field] = _convert({key: table[key] for key in table if key in of_chip}, chip_type, where=where)
    return _convert(data, TargetRow, where=where)


def _options(data: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    options = data.get("compiler_options", {})
    if not isinstance(options, dict):
        raise TargetError(f"{where}: compiler_options must be a table, like {{ xla_gpu_autotune_level = 0 }}.")
    return options


def _convert(data: Mapping[str, Any], record: type[Any], *, where: str) -> Any:
    try:
        found = msgspec.convert(dict(data), record)
    except msgspec.ValidationError as error:
        raise TargetError(f"{where}: {error}. {_OR_BASE}") from None
    for key, value in data.items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise TargetError(f"{where}: {key} = {value} must be above 0; leave out what is unknown.")
    return found


def _fields(record: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}
