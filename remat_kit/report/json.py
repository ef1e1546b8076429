"""A comparison as JSON, schema version `records.SCHEMA_VERSION`, documented in docs/json.md."""

import msgspec

from remat_kit.graph import ResidualReport
from remat_kit.records import SCHEMA_VERSION, CompareRow, Comparison


def comparison_json(comparison: Comparison) -> str:
    """The whole comparison as indented JSON with a final newline."""
    data = {
        "schema": f"remat-kit/compare/{SCHEMA_VERSION}",
        "step": comparison.step,
        "options": dict(comparison.options),
        "flags": dict(comparison.flags),
        "rows": [_row(row) for row in comparison.rows],
        "notes": comparison.notes,
    }
    return json_text(data)


def residuals_json(report: ResidualReport) -> str:
    """A residual report as indented JSON with a final newline."""
    return json_text({"schema": f"remat-kit/residuals/{SCHEMA_VERSION}", **msgspec.to_builtins(report)})


def json_text(data: dict[str, object]) -> str:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"


def _row(row: CompareRow) -> dict[str, object]:
    return {**msgspec.to_builtins(row), "versions": dict(row.versions)}
