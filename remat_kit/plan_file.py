"""A plan as a file, TOML or JSON: what `plan --out` writes, `load_plan` reads, and `--policy @FILE` takes.

In: a `StepPlan`. Out: a file with the plan's text, the step, options, target and versions that it was made for, the fingerprint
of the program and the proof (predicted and compiled bytes, compiles); it is there whole or not at all. Read again it is a
`PlanFile`. A plan that was made with other versions than those installed still loads, with a warning. No JAX.
"""

import importlib.metadata
import json
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from remat_kit.errors import PolicyError, RematWarning
from remat_kit.files import default_mode, write_whole
from remat_kit.grammar import parse_plan, parse_policy
from remat_kit.planning import StepPlan
from remat_kit.plans import Plan, Policies

PLAN_SCHEMA = "remat-kit/plan/1"
SUFFIXES = (".toml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the target's compiler said of a plan; bytes and FLOPs are per device.

    Attributes:
        budget_bytes: What the total is within.
        predicted_total_bytes: Before any compile at full depth; None = there was no smaller one.
        compiled_total_bytes: The compiler's total.
        flops: Of the step.
        recompute_flops: The part that rematerialization adds.
        full_compiles: Compiles of the whole step.
        compiles: All compiles.
        step_s: Predicted seconds of a step, a floor; None = the target's rates are not known.
    """

    budget_bytes: int
    predicted_total_bytes: int | None = None
    compiled_total_bytes: int
    flops: int
    recompute_flops: int
    full_compiles: int
    compiles: int
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan with what it was made for.

    Attributes:
        schema: `remat-kit/plan/1`.
        plan: Text of the plan.
        wraps: The plan by module pattern, later ones win, for a model that nobody edits; empty = it is for stacks.
        step: The step factory.
        options: Its options, as given.
        target: What it was compiled for.
        program: Fingerprint of the step.
        versions: Component -> version.
        proof: What the compiler said.
    """

    schema: str
    plan: str
    wraps: Mapping[str, str] = field(default_factory=dict)
    step: str
    options: Mapping[str, str] = field(default_factory=dict)
    target: str
    program: str
    versions: Mapping[str, str]
    proof: Proof

    @property
    def stack_plan(self) -> Plan:
        """The plan as a record, for `stack` and for `remat`.

        Raises:
            PolicyError: It is for modules, not for stacks.
        """
        if self.wraps:
            raise PolicyError(
                f"this plan is for the modules {', '.join(self.wraps)}: give its `wraps` to rematerialize, or the file to "
                "--wrap @FILE."
            )
        return parse_plan(self.plan)

    @property
    def policies(self) -> Policies:
        """What a step factory is handed: `policies["layers"]` is the plan of that stack.

        Raises:
            PolicyError: It is for modules, not for stacks.
        """
        parts = self.stack_plan.parts
        named = tuple((name, part) for name, part in parts if name is not None)
        return Policies(by_stack=named, default=None if named else parts[0][1])


def plan_file_of(step_plan: StepPlan) -> PlanFile:
    """What is written of a plan.

    Raises:
        PolicyError: It does not fit its budget: there is nothing to use.
    """
    result = step_plan.result
    if not result.fits:
        raise PolicyError(f"no plan fits {step_plan.target}: there is nothing to write.")
    return PlanFile(
        schema=PLAN_SCHEMA,
        plan=result.plan,
        wraps=dict(step_plan.wraps),
        step=step_plan.step,
        options=dict(step_plan.options),
        target=step_plan.target,
        program=step_plan.program,
        versions=dict(step_plan.versions),
        proof=Proof(
            budget_bytes=result.budget_bytes,
            predicted_total_bytes=result.predicted_total_bytes,
            compiled_total_bytes=result.compiled_total_bytes,
            flops=result.flops,
            recompute_flops=result.recompute_flops,
            full_compiles=result.full_compiles,
            compiles=result.compiles,
            step_s=step_plan.step_s,
        ),
    )


def write_plan(step_plan: StepPlan, path: Path) -> None:
    """Writes a plan file, whole or not at all.

    Args:
        step_plan: The plan.
        path: Ends in .toml or .json.

    Raises:
        PolicyError: The name ends otherwise, or no plan fits.
        OSError: The folder can't be written to.
    """
    check_suffix(path)
    data = msgspec.to_builtins(plan_file_of(step_plan))
    text = toml_text(data) if path.suffix == ".toml" else json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, text.encode(), mode=default_mode())


def check_suffix(path: Path) -> None:
    """Raises PolicyError for a name that is not that of a plan file."""
    if path.suffix not in SUFFIXES:
        raise PolicyError(f"{path.name!r} is no name for a plan file: it ends in {' or '.join(SUFFIXES)}.")


def read_plan(path: Path) -> PlanFile:
    """Reads a plan file; warns when it was made with other versions than those installed here.

    Args:
        path: Of the file, TOML or JSON by its ending.

    Raises:
        PolicyError: It can't be read, or is no plan file.

    Warns:
        RematWarning: JAX, its compilers' packages or the file's schema differ.
    """
    check_suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        found = msgspec.convert(data, PlanFile)
    except OSError as error:
        raise PolicyError(f"can't read a plan from {str(path)!r}: {error.strerror}.") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise PolicyError(f"{str(path)!r} is no plan file of remat-kit plan --out: {error}.") from None
    if found.schema != PLAN_SCHEMA:
        raise PolicyError(f"{str(path)!r} has the schema {found.schema!r}; this version reads {PLAN_SCHEMA!r}.")
    try:
        parse_plan(found.plan)
        for policy in found.wraps.values():
            parse_policy(policy)
    except PolicyError as error:
        raise PolicyError(f"in the plan file {str(path)!r}: {error}") from None
    _warn_of_versions(found, path)
    return found


def _warn_of_versions(found: PlanFile, path: Path) -> None:
    differing = []
    for name, version in found.versions.items():
        try:
            here = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue  # a compiler that this machine does not need, or no package at all
        if here != version:
            differing.append(f"{name} {version} (here: {here})")
    if differing:
        warnings.warn(
            f"{path.name} was planned with {', '.join(differing)}: its bytes may differ now. Plan again to be sure.",
            RematWarning,
            stacklevel=3,
        )


def warn_of_step(found: PlanFile, path: Path, *, step: str, options: Mapping[str, str]) -> None:
    """Warns when a plan is used for another step, or other options, than it was made for.

    Args:
        found: The plan.
        path: Its file.
        step: `module:function` of the step that it is used for.
        options: Its options, as given.

    Warns:
        RematWarning: They differ.
    """
    if (found.step, dict(found.options)) != (step, dict(options)):
        made, used = (
            " ".join([name, *(f"{key}={value}" for key, value in given.items())])
            for name, given in ((found.step, found.options), (step, options))
        )
        warnings.warn(f"{path.name} was planned for {made!r} and is used for {used!r}.", RematWarning, stacklevel=3)


def toml_text(data: Mapping[str, Any]) -> str:
    """TOML of a table of texts, numbers, lists of texts and tables of such; None and empty tables are left out."""
    plain = [(key, value) for key, value in data.items() if value is not None and not isinstance(value, Mapping)]
    tables = [(key, value) for key, value in data.items() if isinstance(value, Mapping) and value]
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain]
    for key, table in tables:
        lines += ["", f"[{_key(key)}]"]
        lines += [f"{_key(name)} = {_value(value)}" for name, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _key(text: str) -> str:
    return text if text.isascii() and text.replace("_", "").replace("-", "").isalnum() else _value(text)


def _value(value: Any) -> str:
    # JSON's texts, numbers and lists of these are TOML's, but for DEL, which JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
