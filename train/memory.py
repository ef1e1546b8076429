"""Memory of a step, promised and real: what the compiler counted, and what the device, or on a CPU the process, took.

Devices count their own peak. A CPU has no such counter, so there the growth of the process's resident memory, from before the
first step to its highest, is set against temp + output - alias: arguments were there before. The library's own workspace
(threads, matmul packing) is part of the growth; for small models it is most of it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Written there, it sets the process's highest resident memory to the present one (man 5 proc).
_RESET_HIGHEST = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """The compiler's totals of the step that runs, in bytes of a device.

    Attributes:
        total_bytes: Argument + output - alias + temp.
        growth_bytes: Without the arguments: what a step adds.
    """

    total_bytes: int
    growth_bytes: int


def promised_memory(compiled: Any) -> Promised | None:
    """What a compiled step says; None = its backend doesn't."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    growth = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Promised(total_bytes=stats.argument_size_in_bytes + growth, growth_bytes=growth)


class MemoryWatch:
    """The highest memory since it was made: of this process's devices, or of the process on a CPU."""

    def __init__(self, device: jax.Device) -> None:
        """Starts to watch; make it when the state and the batch are there and nothing has run."""
        self._device = device
        self.is_process = device.memory_stats() is None
        self._start_bytes = _resident("VmRSS")
        if self.is_process:
            _reset_highest()

    def peak_bytes(self) -> int | None:
        """Of the device, all that is in use; of a CPU's process, only the growth. None = not known here."""
        if not self.is_process:
            return self._device.memory_stats().get("peak_bytes_in_use")
        highest = _resident("VmHWM")
        return None if highest is None or self._start_bytes is None else max(0, highest - self._start_bytes)

    def promised_bytes(self, promised: Promised | None) -> int | None:
        """What `peak_bytes` is to be compared with."""
        if promised is None:
            return None
        return promised.growth_bytes if self.is_process else promised.total_bytes


def _resident(field: str) -> int | None:
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _reset_highest() -> None:
    try:
        _CLEAR_REFS.write_text(_RESET_HIGHEST, encoding="ascii")
    except OSError:  # a container may forbid it: the highest then includes what was before
        return
