"""Targets as data: what a device kind can do (rows), and what a user means by `h100:8`. No JAX.

In: a TOML file of rows and a text. Out: `Target`, the record that the other stages read. Making JAX devices of it is
`remat_kit.compile.topology`'s work.
"""

from remat_kit.targets.abilities import Availability, availability, check_abilities
from remat_kit.targets.parse import Target, parse_target
from remat_kit.targets.rows import GpuChip, OptionValue, Rows, TargetRow, TpuChip, load_rows

__all__ = [
    "Availability",
    "GpuChip",
    "OptionValue",
    "Rows",
    "Target",
    "TargetRow",
    "TpuChip",
    "availability",
    "check_abilities",
    "load_rows",
    "parse_target",
]
