"""Bytes, FLOPs and seconds to text and back: the only formatter of the project.

Numbers come in as plain ints and floats in base units (bytes, FLOPs, seconds, bytes/s, FLOP/s). Memory is shown in binary
units (KiB, MiB, GiB), rates and work in decimal ones (TFLOP/s, GB/s), as vendors do. Parsing takes both and says which.
"""

import re

from remat_kit.errors import BudgetError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_LARGEST_BYTES = 2**60
_BYTES = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<prefix>[kmgt]?)(?P<kind>i?b?)", re.IGNORECASE)


def format_bytes(num_bytes: int) -> str:
    """Writes a number of bytes in the binary unit that keeps it short.

    Example:
        >>> format_bytes(16 * 2**30), format_bytes(1536), format_bytes(12)
        ('16.00 GiB', '1.50 KiB', '12 B')
    """
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    exponent = min((abs(num_bytes).bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**exponent:,.2f} {('KiB', 'MiB', 'GiB', 'TiB')[exponent - 1]}"


def format_scaled(value: float, unit: str) -> str:
    """Writes a rate or an amount of work with a decimal prefix.

    Example:
        >>> format_scaled(989e12, "FLOP/s"), format_scaled(0, "FLOP")
        ('989 TFLOP/s', '0 FLOP')
    """
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    exponent = next((number for number in range(6) if abs(value) < 999.5 * 1000**number), 6)
    return f"{value / 1000**exponent:.3g} {prefixes[exponent]}{unit}"


def format_seconds(seconds: float) -> str:
    """Writes a duration.

    Example:
        >>> format_seconds(0.0042), format_seconds(3.21), format_seconds(83), format_seconds(9.8e-6)
        ('4.20 ms', '3.2 s', '1 min 23 s', '9.8 us')
    """
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def parse_bytes(text: str) -> int:
    """Reads an amount of memory: `16GiB`, `16G` (binary, as compilers write it), `16GB` (decimal), `1048576`.

    Args:
        text: A non-negative number, then an optional prefix k, M, G or T with `i`, `iB` or `B`; case does not matter.

    Returns:
        Whole bytes.

    Raises:
        BudgetError: The text is not an amount of memory.

    Example:
        >>> parse_bytes("1.5GiB"), parse_bytes("1GB"), parse_bytes("2M")
        (1610612736, 1000000000, 2097152)
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise BudgetError(f"{text!r} is not an amount of memory. Write a number and a unit, like 16GiB, 500MB or 1048576.")
    kind = match["kind"].lower()
    scale = (_DECIMAL if kind == "b" else _BINARY)[match["prefix"].lower()]
    num_bytes = float(match["number"]) * scale
    if num_bytes > _LARGEST_BYTES:
        raise BudgetError(f"{text[:40]!r} is more memory than there is.")
    return round(num_bytes)
