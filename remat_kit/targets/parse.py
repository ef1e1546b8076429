"""What a user means by `kind[:topology]`: from a text and the rows to a `Target`.

`h100` one device, `h100:8` one host of 8, `h100:2x8` hosts x devices, `v5e:2x2` and `v5p:2x2x4` slices of chips, `cpu:8`, and
`attached`: the devices of this machine, of which nothing is known before JAX has looked.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from remat_kit.errors import TargetError, nearest
from remat_kit.targets.rows import GpuChip, OptionValue, Platform, Rows, TargetRow, TpuChip

ATTACHED = "attached"

_ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e", "tpuv7x": "tpu7x"}
_TOPOLOGY = re.compile(r"\d+(x\d+)*")

# libtpu gives every host 2 x 2 chips (x 1) and refuses slices that these do not tile, except a single chip on its own.
_TPU_HOST = (2, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Devices to compile for. Rates and memory are per JAX device.

    Attributes:
        kind: Of the row; `attached` for the devices of this machine.
        text: As the user spelled it.
        platform: Which compiler; `attached` until JAX has looked (`remat_kit.compile.topology.identify`).
        topology: The numbers as given; () = one device.
        num_hosts: Processes of the real run.
        num_devices: JAX devices.
        device_kind: What JAX calls one.
        memory_bytes: Of a GPU, all of it; of a TPU, what its compiler accepts; None = no limit of its own, or unknown.
        flops_per_s, memory_bytes_per_s, host_bytes_per_s, link_bytes_per_s, price_per_hour: See `TargetRow`; None = unknown.
        dtypes: Floating-point dtypes that it multiplies; None = unknown.
        kernels: Custom kernels that run on it; None = unknown.
        compiler_options: Options that every compile for it gets.
        gpu, tpu: What the compiler of that platform wants to know.
        source: Where the numbers come from.
    """

    kind: str
    text: str
    platform: Platform | Literal["attached"]
    topology: tuple[int, ...]
    num_hosts: int
    num_devices: int
    device_kind: str
    memory_bytes: int | None
    flops_per_s: float | None
    memory_bytes_per_s: float | None
    host_bytes_per_s: float | None
    link_bytes_per_s: float | None
    price_per_hour: float | None
    dtypes: tuple[str, ...] | None
    kernels: tuple[str, ...] | None
    compiler_options: tuple[tuple[str, OptionValue], ...]
    gpu: GpuChip | None
    tpu: TpuChip | None
    source: str


_Layout: TypeAlias = tuple[int, int]
"""Hosts and devices of a target."""


def parse_target(text: str, rows: Rows) -> Target:
    """Reads `kind[:topology]`.

    Args:
        text: What the user wrote; case does not matter.
        rows: See `load_rows`.

    Raises:
        TargetError: The kind is unknown, or it has no such topology.

    Example:
        >>> from remat_kit.targets import load_rows
        >>> target = parse_target("h100:2x8", load_rows())
        >>> target.num_hosts, target.num_devices, target.topology
        (2, 16, (2, 8))
    """
    kind, colon, written = text.strip().lower().partition(":")
    kind = _ALIASES.get(kind, kind) if kind not in rows else kind
    if kind == ATTACHED:
        return _attached(text, has_topology=bool(colon))
    row = rows.get(kind)
    if row is None:
        raise TargetError(_unknown(text, kind, [*rows, ATTACHED]))
    topology = _numbers(text, written, row) if colon else ()
    num_hosts, num_devices = _layout(text, topology, row)
    return make_target(row, text=text, topology=topology, num_hosts=num_hosts, num_devices=num_devices)


def make_target(row: TargetRow, *, text: str, topology: tuple[int, ...], num_hosts: int, num_devices: int) -> Target:
    """A row's facts with a number of devices."""
    return Target(
        kind=row.kind,
        text=text,
        platform=row.platform,
        topology=topology,
        num_hosts=num_hosts,
        num_devices=num_devices,
        device_kind=row.device_kind,
        memory_bytes=row.memory_bytes,
        flops_per_s=row.flops_per_s,
        memory_bytes_per_s=row.memory_bytes_per_s,
        host_bytes_per_s=row.host_bytes_per_s,
        link_bytes_per_s=row.link_bytes_per_s,
        price_per_hour=row.price_per_hour,
        dtypes=row.dtypes,
        kernels=row.kernels,
        compiler_options=row.compiler_options,
        gpu=row.gpu,
        tpu=row.tpu,
        source=row.source,
    )


def _unknown(text: str, kind: str, allowed: list[str]) -> str:
    longer = [name for name in allowed if kind and name.startswith(kind)]
    hint = f" Did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(kind, allowed)
    return f"unknown target {kind!r} in {text!r}.{hint} Known: {', '.join(allowed)}."


def _attached(text: str, *, has_topology: bool) -> Target:
    if has_topology:
        raise TargetError(f"{text!r}: attached stands for all devices of this machine and takes no topology. Write 'attached'.")
    unknown = None
    return Target(
        kind=ATTACHED,
        text=text,
        platform=ATTACHED,
        topology=(),
        num_hosts=1,
        num_devices=1,
        device_kind=ATTACHED,
        memory_bytes=unknown,
        flops_per_s=unknown,
        memory_bytes_per_s=unknown,
        host_bytes_per_s=unknown,
        link_bytes_per_s=unknown,
        price_per_hour=unknown,
        dtypes=unknown,
        kernels=unknown,
        compiler_options=(),
        gpu=unknown,
        tpu=unknown,
        source="the devices of this machine",
    )


def _numbers(text: str, written: str, row: TargetRow) -> tuple[int, ...]:
    if not _TOPOLOGY.fullmatch(written):
        raise TargetError(f"{text!r}: {written!r} is not a topology. {_spelling(row)}")
    topology = tuple(int(number) for number in written.split("x"))
    if 0 in topology:
        raise TargetError(f"{text!r} has no devices: every number of a topology is at least 1. {_spelling(row)}")
    return topology


def _layout(text: str, topology: tuple[int, ...], row: TargetRow) -> _Layout:
    if row.tpu is not None:
        return _tpu_layout(text, topology, row, row.tpu)
    if len(topology) > (2 if row.platform == "cuda" else 1):
        raise TargetError(f"{text!r} has too many numbers. {_spelling(row)}")
    return (topology[0] if len(topology) == 2 else 1), math.prod(topology)


def _tpu_layout(text: str, topology: tuple[int, ...], row: TargetRow, chip: TpuChip) -> _Layout:
    if not topology:
        return 1, 1
    if len(topology) != chip.topology_rank:
        raise TargetError(f"{text!r}: a topology of {row.kind} has {chip.topology_rank} numbers. {_spelling(row)}")
    num_chips = math.prod(topology)
    if num_chips > 1 and any(number % host for number, host in zip(topology, _TPU_HOST, strict=False)):
        raise TargetError(
            f"{text!r}: {row.kind} has no such slice; the first two numbers are even, or all are 1. {_spelling(row)}"
        )
    if num_chips > chip.max_chips:
        raise TargetError(f"{text!r} has {num_chips:,} chips; a slice of {row.kind} has at most {chip.max_chips:,}.")
    return max(1, num_chips // math.prod(_TPU_HOST)), num_chips * chip.devices_per_chip


def _spelling(row: TargetRow) -> str:
    kind = row.kind
    if row.tpu is not None:
        small, large = ("2x2", "4x4") if row.tpu.topology_rank == 2 else ("2x2x1", "4x4x4")
        return f"Write {kind} for one device, or chips like {kind}:{small} or {kind}:{large}."
    if row.platform == "cuda":
        return f"Write {kind} for one device, {kind}:8 for a host of 8, or {kind}:2x8 for hosts x devices."
    return f"Write {kind} for one device, or {kind}:8 for 8."
