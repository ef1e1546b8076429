"""The targets and whether they can be compiled for here, as a table for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit.report.cells import UNAVAILABLE
from remat_kit.targets import Availability, TargetRow
from remat_kit.units import format_bytes, format_scaled

COLUMNS = ("target", "device", "memory", "peak", "bandwidth", "host link", "here?")


def write_targets(rows: list[tuple[TargetRow, Availability]], console: Console) -> None:
    """Writes a row for each target, what is missing to compile for it, and how targets are spelled."""
    table = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[2:6] else "left", no_wrap=True)
    for row, found in rows:
        table.add_row(*(Text(cell) for cell in _cells(row, found)))
    console.print(table)
    for remedy in dict.fromkeys(found.remedy for _, found in rows if found.remedy):
        names = ", ".join(row.kind for row, found in rows if found.remedy == remedy)
        console.print(Text(f"{names}: {remedy}"))
    console.print(
        Text("Spelled h100 (one device), h100:8 (a host of 8), h100:2x8 (hosts x devices), v5e:2x2, v5p:2x2x4, cpu:8, attached.")
    )
    console.print(
        Text("memory of a TPU: what its compiler accepts; peak: dense 16-bit matmuls; all per JAX device.", style="dim")
    )


def _cells(row: TargetRow, found: Availability) -> tuple[str, ...]:
    return (
        row.kind,
        row.device_kind,
        UNAVAILABLE if row.memory_bytes is None else format_bytes(row.memory_bytes),
        UNAVAILABLE if row.flops_per_s is None else format_scaled(row.flops_per_s, "FLOP/s"),
        UNAVAILABLE if row.memory_bytes_per_s is None else format_scaled(row.memory_bytes_per_s, "B/s"),
        UNAVAILABLE if row.host_bytes_per_s is None else format_scaled(row.host_bytes_per_s, "B/s"),
        "yes" if found.is_available else "no",
    )
