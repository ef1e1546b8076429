"""Explanations of the field's models held against what must be true of them.

    python -m benchmarks.explain_matrix
    python -m benchmarks.explain_matrix --case flax_gpt2 --target v5e --policy full

A row for each model, target and policy: the peak, what its lines miss of it (0), the part without a name, the named residuals
whose bytes are those of the trace, by how much trace and compiled program differ in matmul FLOPs in the phase where they differ
most, gathers of weights by phase, the analysis' part of the compile's time, and findings. 1 where lines do not add up, more than
5 % has no name, a residual's bytes are wrong or FLOPs differ by more than 1 % without a reason. `flax_gpt2` is
`FlaxGPT2LMHeadModel` of transformers, unmodified, its policies by module path.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import remat_kit
from remat_kit.explanation import Explanation
from remat_kit.memory import CollectiveMeaning, PeakKind

MOST_OTHER, MOST_OFF = 0.05, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step on some targets.

    Attributes:
        step: Its factory.
        targets: Their texts.
        policies: Their texts.
        options: Of the factory.
        pattern: Of the layers of a model that nobody edits.
    """

    step: str
    targets: tuple[str, ...]
    policies: tuple[str, ...] = ("none", "full", "dots_no_batch", "save_qkv_proj")
    options: dict[str, object] = field(default_factory=dict)
    pattern: str | None = None


CASES = {
    "gpt2_small": Case(step="models:gpt2_small", targets=("cpu", "h100", "v5e"), options={"batch": 8, "seq": 1024}),
    "flax_gpt2": Case(
        step="tests.explain_steps:flax_gpt2",
        targets=("h100", "v5e"),
        policies=("none", "full", "dots_no_batch", "save(*/c_fc)"),
        pattern="transformer/h/*",
    ),
    "llama3_8b": Case(step="models:llama3_8b", targets=("h100:8", "v5p:2x2x4"), options={"batch": 32, "seq": 2048}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explain_matrix")
    parser.add_argument("--case", choices=CASES, action="append", help="which models; all without")
    parser.add_argument("--target", action="append", help="which of their targets; all without")
    parser.add_argument("--policy", action="append", help="which of their policies; all without")
    given = parser.parse_args(arguments)
    is_right = True
    for name in given.case or CASES:
        case = CASES[name]
        for target in (each for each in case.targets if each in (given.target or case.targets)):
            for policy in given.policy or case.policies:
                found = _explain(case, policy, target)
                faults = list(_faults(found))
                sys.stdout.write("\n    ".join((_line(name, found), *_reasons(found), *faults)) + "\n")
                sys.stdout.flush()
                is_right &= not faults
    return 0 if is_right else 1


def _explain(case: Case, policy: str, target: str) -> Explanation:
    how = {"wraps": {case.pattern: policy}} if case.pattern and policy != "none" else {"policy": policy}
    return remat_kit.explain(case.step, target=target, options=case.options, most_checks=0, **how)


def _line(name: str, found: Explanation) -> str:
    kinds = Counter(finding.kind for finding in found.findings)
    gathers = Counter(each.phase for each in found.work.collectives if each.meaning is CollectiveMeaning.WEIGHT_GATHER)
    times = found.compiled.compile_s
    return (
        f"{name:10} {found.target:9} {found.policy or 'by path':14} {found.memory.peak_bytes:>14,} B  "
        f"other {_other(found):.2%}  named {sum(1 for _ in _named(found))}  FLOPs off {_most_off(found):.3%}  "
        f"gathers {dict(gathers)}  analysis {found.analysis_s:.1f} s of {times:.0f} s  findings {dict(kinds)}"
    )


def _faults(found: Explanation) -> Iterator[str]:
    missing = found.memory.peak_bytes - sum(line.bytes for line in found.memory.peak_classes)
    if missing:
        yield f"the lines miss {missing} bytes of the peak"
    if _other(found) > MOST_OTHER:
        yield f"{_other(found):.1%} of the peak has no name"
    for name, bytes_found, bytes_wanted in _named(found):
        if bytes_found != bytes_wanted:
            yield f"{name}: {bytes_found} bytes, the trace keeps {bytes_wanted}"
    for each in found.agreement:
        if not each.reasons and abs(each.hlo_flops - each.trace_flops) > MOST_OFF * each.trace_flops:
            yield f"{each.phase}: {each.hlo_flops} FLOPs in the program, {each.trace_flops} in the trace, without a reason"


def _reasons(found: Explanation) -> Iterator[str]:
    return (f"{each.phase}: {reason}" for each in found.agreement for reason in each.reasons)


def _other(found: Explanation) -> float:
    return sum(line.bytes for line in found.memory.peak_classes if line.kind is PeakKind.OTHER) / found.memory.peak_bytes


def _named(found: Explanation) -> Iterator[tuple[str, int, int]]:
    """Name, logical bytes at the peak and bytes of the trace, per device, of each stacked residual that has a name."""
    lines = {line.name: line for line in found.memory.peak_classes if line.kind is PeakKind.RESIDUALS}
    kept = Counter[str]()  # a kernel's output and its statistics have one name
    for value in found.residuals.residuals:
        name = next((name for name in value.names if name in lines), None)
        if name is not None and value.num_layers > 1:
            kept[name] += value.device_bytes or value.num_bytes // found.trace.num_devices
    return ((name, lines[name].logical_bytes, wanted) for name, wanted in kept.items())


def _most_off(found: Explanation) -> float:
    return max(abs(each.hlo_flops - each.trace_flops) / each.trace_flops for each in found.agreement if each.trace_flops)


if __name__ == "__main__":
    sys.exit(main())
