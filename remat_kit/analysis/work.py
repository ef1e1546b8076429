"""What a compiled step computes and moves, from its HLO alone.

In: `HloModule`. Out: `WorkReport`: matmul FLOPs, kernels and bytes per phase times the loops' trip counts, collectives by
meaning, custom calls, opcode counts, and the instructions that XLA's own rematerialization added. The phase of a matmul inside
a fusion is its own, not the fusion's.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from remat_kit.analysis.collectives import collectives_of
from remat_kit.analysis.hlo import Computation, HloModule, Instruction
from remat_kit.analysis.loops import Execution, executions, loops_of
from remat_kit.analysis.matmuls import is_known_matmul, library_call, matmul_flops
from remat_kit.analysis.phases import phase_of
from remat_kit.analysis.traffic import traffic_bytes
from remat_kit.memory import CustomCall, PhaseWork, StepPhase, WorkReport

_NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id domain "
    "opt-barrier optimization-barrier copy-start copy-done async-start async-update async-done".split()
)
_NO_CALL = frozenset(
    ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
)


@dataclass(slots=True)
class _Sums:
    """Running sums of the walk."""

    flops: Counter[StepPhase] = field(default_factory=Counter)
    kernels: Counter[StepPhase] = field(default_factory=Counter)
    traffic: Counter[StepPhase] = field(default_factory=Counter)
    calls: Counter[tuple[str, StepPhase]] = field(default_factory=Counter)
    call_flops: Counter[tuple[str, StepPhase]] = field(default_factory=Counter)
    call_names: dict[tuple[str, StepPhase], str] = field(default_factory=dict)


def count_work(module: HloModule) -> WorkReport:
    """Counts the work of a step.

    Args:
        module: Its compiled program.

    Returns:
        The counts, per device.
    """
    sums = _Sums()
    inside: dict[str, Counter[str]] = {}
    opcodes: Counter[str] = Counter()
    num_remat = 0
    seen: set[str] = set()
    runs = tuple(executions(module))
    for run in runs:
        _add(run, sums, module, inside)
        if run.instruction.name not in seen:
            seen.add(run.instruction.name)
            opcodes[run.instruction.opcode] += 1
            num_remat += ".remat" in run.instruction.name
    return WorkReport(
        phases=tuple(
            PhaseWork(
                phase=phase, matmul_flops=sums.flops[phase], num_kernels=sums.kernels[phase], traffic_bytes=sums.traffic[phase]
            )
            for phase in StepPhase
        ),
        collectives=collectives_of(module, runs),
        custom_calls=tuple(_custom_calls(sums)),
        opcodes=tuple(sorted(opcodes.items())),
        num_xla_remat=num_remat,
        loops=tuple(loops_of(module).items()),
    )


def _add(run: Execution, sums: _Sums, module: HloModule, inside: dict[str, Counter[str]]) -> None:
    instruction = run.instruction
    for name, flops in _flops(instruction, run.computation, module, inside).items():
        sums.flops[phase_of(name or run.op_name)] += flops * run.times
    target = library_call(instruction)
    if instruction.opcode in _NO_KERNEL or instruction.opcode.endswith("-done") or target in _NO_CALL:
        return
    phase = phase_of(run.op_name)
    sums.kernels[phase] += run.times
    sums.traffic[phase] += traffic_bytes(instruction, run.computation, module) * run.times
    if target:
        key = (target, phase)
        sums.calls[key] += run.times
        sums.call_flops[key] += matmul_flops(instruction, run.computation) * run.times
        sums.call_names.setdefault(key, instruction.op_name)


def _flops(
    instruction: Instruction, computation: Computation, module: HloModule, inside: dict[str, Counter[str]]
) -> Counter[str]:
    """FLOPs of one run by `op_name`; a fusion's are those of the computation that it calls."""
    if instruction.opcode != "fusion":
        flops = matmul_flops(instruction, computation)
        return Counter({instruction.op_name: flops}) if flops else Counter()
    name = instruction.called[0]
    if name not in inside:
        total: Counter[str] = Counter()
        inner = module.computations[name]
        for part in inner.instructions:
            total += _flops(part, inner, module, inside)
        inside[name] = total
    found = inside[name]
    if "" in found and instruction.op_name:  # what the compiler made without a name is the fusion's
        found = Counter(found)
        found[instruction.op_name] += found.pop("")
    return found


def _custom_calls(sums: _Sums) -> Iterator[CustomCall]:
    for (target, phase), count in sorted(sums.calls.items()):
        flops = sums.call_flops[target, phase] if is_known_matmul(target) else None
        yield CustomCall(target=target, phase=phase, count=count, flops=flops, op_name=sums.call_names[target, phase])
