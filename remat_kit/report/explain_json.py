"""An explanation as JSON that can be read again, and back; documented in docs/explain.md.

The fields of the `compare` row and of the memory and work reports stand at the top level, so that a script finds `peak_bytes`
beside `total_bytes`; nothing is left out, so that a saved report is as good as a new one.
"""

import dataclasses
from typing import Any

import msgspec

from remat_kit.errors import StepError
from remat_kit.explanation import EXPLAIN_SCHEMA_VERSION, Difference, Explanation
from remat_kit.memory import MemoryReport, WorkReport
from remat_kit.records import CompareRow

SCHEMA = f"remat-kit/explain/{EXPLAIN_SCHEMA_VERSION}"
DIFFERENCE_SCHEMA = f"remat-kit/difference/{EXPLAIN_SCHEMA_VERSION}"

_OPENED = {"row": CompareRow, "memory": MemoryReport, "work": WorkReport}
_RENAMED = {("memory", "device"): "device_totals", ("memory", "host"): "host_totals", ("memory", "notes"): "memory_notes"}
_FINDING = {"code": "kind", "bytes": "bytes_at_stake", "flops": "flops_at_stake"}
_HIDDEN = {("row", "notes"), ("row", "versions")}  # they stand in the explanation's own


def explanation_json(explanation: Explanation) -> str:
    """The whole explanation as indented JSON with a final newline."""
    data: dict[str, Any] = msgspec.to_builtins(explanation)
    flat: dict[str, Any] = {"schema": SCHEMA, **{name: data[name] for name in ("step", "options", "flags")}}
    for part in _OPENED:
        for name, value in data.pop(part).items():
            if (part, name) not in _HIDDEN:
                flat[_RENAMED.get((part, name), name)] = value  # pyright: ignore[reportArgumentType]
    flat |= data
    flat["versions"] = dict(explanation.versions)
    flat["options"], flat["flags"] = dict(explanation.options), dict(explanation.flags)
    for name in ("peak_classes", "host_classes"):
        flat[name] = [_with_class(line) for line in flat[name]]
    flat["findings"] = [_finding_out(finding) for finding in flat["findings"]]
    return _text(flat)


def read_explanation(text: bytes | str, *, name: str) -> Explanation:
    """Reads what `explanation_json` wrote.

    Args:
        text: JSON.
        name: What to call it in errors: its path.

    Raises:
        StepError: It is something else, or of another version.
    """
    try:
        flat = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StepError(f"{name} is not JSON: {error}") from None
    schema = flat.get("schema") if isinstance(flat, dict) else None
    if schema != SCHEMA:
        raise StepError(f"{name} has schema {schema!r}; a report of this version of `explain --format json` has {SCHEMA!r}.")
    try:
        return msgspec.convert(_folded(flat), Explanation)
    except (msgspec.ValidationError, KeyError, AttributeError, TypeError) as error:
        raise StepError(f"{name} is a damaged report: {error}.") from None


def difference_json(difference: Difference) -> str:
    """A difference as indented JSON with a final newline."""
    return _text({"schema": DIFFERENCE_SCHEMA, **msgspec.to_builtins(difference)})


def _folded(flat: dict[str, Any]) -> dict[str, Any]:
    flat = dict(flat)
    del flat["schema"], flat["versions"]
    for name in ("peak_classes", "host_classes"):
        flat[name] = [{**line, "kind": line["class"]} for line in flat[name]]
    flat["findings"] = [_finding_in(finding) for finding in flat["findings"]]
    for part, record in _OPENED.items():
        names = (field.name for field in dataclasses.fields(record) if (part, field.name) not in _HIDDEN)
        written = {name: _RENAMED.get((part, name), name) for name in names}
        flat[part] = {name: flat.pop(key) for name, key in written.items()}
    flat["options"], flat["flags"] = list(flat["options"].items()), list(flat["flags"].items())
    return flat


def _finding_out(finding: dict[str, Any]) -> dict[str, Any]:
    remedy = finding["remedy"] or {"text": None, "change": None}
    short = {key: finding[name] for key, name in _FINDING.items()}
    rest = {name: value for name, value in finding.items() if name not in (*_FINDING.values(), "message", "remedy")}
    return {**short, "message": finding["message"], "remedy": remedy["text"], "change": remedy["change"], **rest}


def _finding_in(finding: dict[str, Any]) -> dict[str, Any]:
    remedy = None if finding["remedy"] is None else {"text": finding["remedy"], "change": finding["change"]}
    rest = {name: value for name, value in finding.items() if name not in (*_FINDING, "change")}
    return {**rest, **{name: finding[key] for key, name in _FINDING.items()}, "remedy": remedy}


def _with_class(line: dict[str, Any]) -> dict[str, Any]:
    return {"class": line["kind"], **{name: value for name, value in line.items() if name != "kind"}}


def _text(data: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"
