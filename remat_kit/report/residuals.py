"""What a step keeps and computes again, as tables for a terminal: what is wrong first."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit.graph import Origin, Recomputed, Residual, ResidualReport
from remat_kit.report.cells import UNAVAILABLE
from remat_kit.units import format_bytes, format_scaled

MOST_RECOMPUTED = 12
"""Rows of the second table: the rest is in the JSON."""

LONGEST_PLACE = 40
"""Characters of a file and line; of longer ones the last folder is shown."""

_KEPT = ("value", "shape", "dtype", "layers", "bytes", "of it on a device", "where", "kept by")
_AGAIN = ("operation", "makes", "source", "times", "FLOPs per device", "bytes per device")


def write_residuals(report: ResidualReport, console: Console) -> None:
    """Writes the findings, what is kept from the forward to the backward pass, and what runs again."""
    for finding in report.findings:
        console.print(Text(f"! {finding.message}", style="bold yellow"))
    kept = [residual for residual in report.residuals if residual.origin is Origin.OPERATION]
    console.print(_table("Kept for the backward pass", _KEPT, [_kept(residual) for residual in kept]))
    again = [op for op in report.recomputed if op.flops is None or op.flops > 0][:MOST_RECOMPUTED]
    console.print(_table("Computed again: matmuls and kernels", _AGAIN, [_again(op) for op in again]))


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if "bytes" in column or "device" in column else "left", overflow="fold")
    for row in rows or [("nothing", *([""] * (len(columns) - 1)))]:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _kept(residual: Residual) -> tuple[str, ...]:
    return (
        ", ".join(residual.names) or f"{residual.kind} at {_place(residual.source)}".removesuffix(" at "),
        "x".join(map(str, residual.shape)),
        residual.dtype,
        str(residual.num_layers),
        format_bytes(residual.num_bytes),
        UNAVAILABLE if residual.device_bytes is None else format_bytes(residual.device_bytes),
        "host" if residual.is_on_host else "device",
        residual.rule or "",
    )


def _again(op: Recomputed) -> tuple[str, ...]:
    return (
        op.kind,
        ", ".join(op.names),
        _place(op.source),
        str(op.calls),
        UNAVAILABLE if op.flops is None else format_scaled(op.flops, "FLOP"),
        format_bytes(op.num_bytes),
    )


def _place(source: str) -> str:
    return source if len(source) <= LONGEST_PLACE else "…/" + "/".join(source.split("/")[-2:])
