"""Explanations of the field's models held against what must be true of them.

    python -m benchmarks.explain_matrix
    python -m benchmarks.explain_matrix --case flax_gpt2 --target v5e --policy full

A row for each model, target and policy: the peak, the part without a name, the named residuals whose bytes are those by hand, by
how much trace and compiled program differ in matmul FLOPs in the phase where they differ most, gathers of weights forward,
recomputed and backward, the analysis' part of the compile's time, and findings. 1 where lines do not add up, more than 5 % has no
name, a residual's bytes are not name x layers x shape, a kept name has no line, FLOPs differ by more than 1 % without a reason,
sharded weights are not gathered, the analysis took more than a tenth of the compile's time, or a finding is told that is not true
of these models. `flax_gpt2` is `FlaxGPT2LMHeadModel` of transformers, unmodified, its policies by module path.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import remat_kit
from remat_kit.explanation import Explanation
from remat_kit.findings import FindingKind
from remat_kit.memory import CollectiveMeaning, PeakKind, StepPhase

MOST_OTHER, MOST_OFF, MOST_ANALYSIS = 0.05, 0.01, 0.1
NEGLIGIBLE = 1e-4  # of the step's FLOPs
QKV = ("q", "k", "v")
KEPT = {"none": (), "full": ("block_in",), "minimal": ("block_in", *QKV, "attn_out", "up"), "save_qkv_proj": ("block_in", *QKV)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step on some targets.

    Attributes:
        step: Its factory.
        targets: Their texts.
        layers: Of the stack.
        tokens: Of the whole batch.
        token_bytes: Name -> bytes of a token's value, in every layer.
        kept: Policy -> names that must be at the peak.
        options: Of the factory.
        pattern: Of the layers of a model that nobody edits.
        true: Findings that are true of it as it is.
    """

    step: str
    targets: tuple[str, ...]
    layers: int
    tokens: int
    token_bytes: dict[str, int]
    kept: dict[str, tuple[str, ...]] = field(default_factory=lambda: KEPT)
    options: dict[str, object] = field(default_factory=dict)
    pattern: str | None = None
    true: frozenset[FindingKind] = frozenset()


def _llama_bytes(width: int, hidden: int) -> dict[str, int]:
    narrow = dict.fromkeys(("k", "v"), 2 * 8 * 128)  # 8 heads of keys and values
    return narrow | dict.fromkeys(("block_in", "q", "attn_out"), 2 * width) | dict.fromkeys(("gate", "up"), 2 * hidden)


# XLA for TPUs moves the casts of weights out of the loop over layers.
OF_SHARDED = frozenset({FindingKind.EXTRA_WEIGHT_GATHERS, FindingKind.WEIGHT_COPIES})
CASES = {
    "gpt2_small": Case(
        step="models:gpt2_small",
        targets=("cpu", "h100", "v5e"),
        layers=12,
        tokens=8 * 1024,
        token_bytes=dict.fromkeys(("block_in", *QKV, "attn_out"), 2 * 768) | {"up": 2 * 3072},
        options={"batch": 8, "seq": 1024},
        true=frozenset({FindingKind.WEIGHT_COPIES}),
    ),
    "flax_gpt2": Case(
        step="tests.explain_steps:flax_gpt2",
        targets=("h100", "v5e"),
        layers=12,
        tokens=4 * 1024,
        token_bytes={"transformer/h/*/mlp/c_fc": 4 * 3072},
        kept={"none": (), "full": (), "dots_no_batch": (), "save(*/c_fc)": ("transformer/h/*/mlp/c_fc",)},
        pattern="transformer/h/*",
        true=frozenset({FindingKind.WHOLE_LOGITS, FindingKind.UNROLLED_LAYERS}),
    ),
    "llama3_8b": Case(
        step="models:llama3_8b",
        targets=("h100:8", "v5p:2x2x4"),
        layers=32,
        tokens=32 * 2048,
        token_bytes=_llama_bytes(4096, 14_336),
        options={"batch": 32, "seq": 2048},
        true=OF_SHARDED,
    ),
    "llama3_70b": Case(
        step="models:llama3_70b",
        targets=("v5p:4x4x8",),
        layers=80,
        tokens=128 * 2048,
        token_bytes=_llama_bytes(8192, 28_672),
        kept={"full": ("block_in",), "save_qkv_proj": ("block_in", *QKV)},
        options={"batch": 128, "seq": 2048},
        true=OF_SHARDED,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explain_matrix")
    parser.add_argument("--case", choices=CASES, action="append", help="which models; all without")
    parser.add_argument("--target", action="append", help="which of their targets; all without")
    parser.add_argument("--policy", action="append", help="which of their policies; all without")
    parser.add_argument("--checks", type=int, default=0, help="remedies to compile for each explanation")
    given = parser.parse_args(arguments)
    is_right = True
    for name in given.case or CASES:
        case = CASES[name]
        for target in (each for each in case.targets if each in (given.target or case.targets)):
            for policy in given.policy or case.kept:
                found = _explain(case, policy, target, most_checks=given.checks)
                faults = [f"<- {fault}" for fault in _faults(case, policy, found)]
                sys.stdout.write("\n    ".join((_line(name, found), *_reasons(found), *faults)) + "\n")
                sys.stdout.flush()
                is_right &= not faults
    return 0 if is_right else 1


def _explain(case: Case, policy: str, target: str, *, most_checks: int) -> Explanation:
    how = {"wraps": {case.pattern: policy}} if case.pattern and policy != "none" else {"policy": policy}
    return remat_kit.explain(case.step, target=target, options=case.options, most_checks=most_checks, **how)


def _line(name: str, found: Explanation) -> str:
    kinds = Counter(str(finding.kind) for finding in found.findings)
    gathers = "/".join(str(_gathers(found, phase)) for phase in (StepPhase.FORWARD, StepPhase.RECOMPUTE, StepPhase.BACKWARD))
    return (
        f"{name:10} {found.target:9} {found.policy:30} {found.memory.peak_bytes:>14,} B  other {_other(found):.2%}  "
        f"FLOPs off {_most_off(found):.3%}  gathers {gathers}  analysis {found.analysis_s:.1f} s of "
        f"{found.compiled.compile_s:.0f} s  findings {', '.join(f'{kind} x {count}' for kind, count in kinds.items()) or 'none'}"
    )


def _faults(case: Case, policy: str, found: Explanation) -> Iterator[str]:
    missing = found.memory.peak_bytes - sum(line.bytes for line in found.memory.peak_classes)
    if missing:
        yield f"the lines miss {missing} bytes of the peak"
    if _other(found) > MOST_OTHER:
        yield f"{_other(found):.1%} of the peak has no name"
    yield from _wrong_residuals(case, policy, found)
    least = NEGLIGIBLE * sum(each.trace_flops for each in found.agreement)
    for each in found.agreement:
        if not each.reasons and abs(each.hlo_flops - each.trace_flops) > max(least, MOST_OFF * each.trace_flops):
            yield f"{each.phase}: {each.hlo_flops} FLOPs in the program, {each.trace_flops} in the trace, without a reason"
    if found.analysis_s > MOST_ANALYSIS * found.compiled.compile_s:
        yield "reading and analysing took more than a tenth of the compile's time"
    if found.trace.num_devices > 1 and not _gathers(found, StepPhase.FORWARD):
        yield "no weight is gathered"
    yield from (f"{each.kind}: {each.message}" for each in found.findings if each.kind not in case.true)


def _wrong_residuals(case: Case, policy: str, found: Explanation) -> Iterator[str]:
    tokens = case.layers * case.tokens // found.trace.num_devices
    lines = {line.name: line for line in found.memory.peak_classes if line.kind is PeakKind.RESIDUALS}
    yield from (f"{name} is kept and has no line" for name in case.kept[policy] if name not in lines)
    for name, token_bytes in case.token_bytes.items():
        if name in lines and lines[name].logical_bytes != tokens * token_bytes:
            yield f"{name}: {lines[name].logical_bytes} bytes, by hand {tokens * token_bytes}"


def _reasons(found: Explanation) -> Iterator[str]:
    return (f"{each.phase}: {reason}" for each in found.agreement for reason in each.reasons)


def _other(found: Explanation) -> float:
    return sum(line.bytes for line in found.memory.peak_classes if line.kind is PeakKind.OTHER) / found.memory.peak_bytes


def _gathers(found: Explanation, phase: StepPhase) -> int:
    gathers = (each for each in found.work.collectives if each.meaning is CollectiveMeaning.WEIGHT_GATHER)
    return sum(each.count for each in gathers if each.phase is phase)


def _most_off(found: Explanation) -> float:
    return max(abs(each.hlo_flops - each.trace_flops) / each.trace_flops for each in found.agreement if each.trace_flops)


if __name__ == "__main__":
    sys.exit(main())
