"""Reads golden compiled steps; `make` writes them."""

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat_kit.analysis.dump import Dump, DumpTexts, parse_dump
from remat_kit.graph import Origin, Residual
from remat_kit.records import MemoryBytes

FOLDER = Path(__file__).parent
STEPS = tuple(sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz")))


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A golden step: its dump, and what was known when it was compiled."""

    name: str
    texts: dict[str, str]
    dump: Dump
    facts: dict[str, Any]
    residuals: tuple[Residual, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model and number of devices."""
        return self.facts["sizes"]

    def totals(self, prefix: str = "") -> MemoryBytes:
        """The compiler's own totals, of device memory or with the prefix `host_` of host memory."""
        kinds = ("argument", "output", "alias", "temp")
        return MemoryBytes(**{f"{kind}_bytes": self.facts["totals"][f"{prefix}{kind}_size_in_bytes"] for kind in kinds})


def read_golden(name: str) -> Golden:
    """Reads one by the name of its file."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    facts = json.loads(texts.pop("facts.json"))
    hlo, assignment, live_ranges = (
        next(text for key, text in texts.items() if key.endswith(end))
        for end in ("optimizations.txt", "-buffer-assignment.txt", "-live-range.txt")
    )
    dump = parse_dump(DumpTexts(hlo=hlo, assignment=assignment, live_ranges=live_ranges))
    residuals = tuple(
        Residual(**each | {"names": tuple(each["names"]), "shape": tuple(each["shape"]), "origin": Origin(each["origin"])})
        for each in facts["residuals"]
    )
    return Golden(name=name, texts=texts, dump=dump, facts=facts, residuals=residuals)
