"""Where the memory of a compiled step goes: joins the readers of this package.

In: `Dump`, and beside it the compiler's own totals, the roles of arguments and the residuals that the trace found. Out:
`MemoryReport`. A total that disagrees with the compiler's is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from remat_kit.analysis.arguments import arguments_of
from remat_kit.analysis.assignment import BufferTotals, elsewhere_bytes
from remat_kit.analysis.attribution import peak_classes
from remat_kit.analysis.dataflow import index_dataflow
from remat_kit.analysis.dump import Dump
from remat_kit.analysis.labels import Evidence, vocabulary_of
from remat_kit.analysis.liveness import Arena, arena_of, schedule_phases, space_of, timeline_of, totals_of
from remat_kit.analysis.stacks import stacks_of
from remat_kit.errors import DumpError
from remat_kit.graph import Residual
from remat_kit.memory import MemoryReport, PeakClass, PeakKind, Space, SpaceTotals, StepPhase
from remat_kit.records import MemoryBytes

MAX_RESERVED_BYTES = 64 * 1024


def explain_memory(
    dump: Dump,
    *,
    roles: Mapping[str, str] | None = None,
    residuals: Sequence[Residual] = (),
    device: MemoryBytes | None = None,
    host: MemoryBytes | None = None,
    peak_memory_bytes: int | None = None,
) -> MemoryReport:
    """Explains the memory of a step.

    Args:
        dump: What its compile wrote down.
        roles: Path of an argument -> its role (`remat_kit.step.ARGUMENT_ROLES`); guessed from the path where missing.
        residuals: What the trace says is kept; gives names to stacked buffers.
        device: The compiler's totals of device memory, to be held against the dump's.
        host: The same for host memory.
        peak_memory_bytes: The compiler's `peak_memory_in_bytes`, only a witness: see `check_totals`.

    Returns:
        The report.

    Raises:
        DumpError: If the compiler's totals and the dump disagree.
    """
    flow = index_dataflow(dump.module)
    arguments = arguments_of(dump.module, roles)
    evidence = Evidence(
        flow=flow,
        arguments=arguments,
        stacks=stacks_of(flow, residuals),
        residuals=residuals,
        vocabulary=vocabulary_of(arguments),
    )
    arena = arena_of(dump, Space.DEVICE)
    found, elsewhere = totals_of(dump, Space.DEVICE, arena), elsewhere_bytes(dump.allocations)
    totals, notes = check_totals(found, device, peak_memory_bytes=peak_memory_bytes, elsewhere=elsewhere)
    phases = schedule_phases(dump, flow)
    classes = peak_classes(dump, evidence, arena, phases, space=Space.DEVICE)
    if totals.reserved_bytes:
        classes = (*classes, _reserved(totals))
    host_totals, host_classes = _explain_host(dump, evidence, host)
    fixed = totals.argument_bytes + totals.output_bytes - totals.alias_bytes
    return MemoryReport(
        peak_bytes=totals.total_bytes,
        peak_point=arena.peak_point,
        peak_phase=phases[arena.peak_point] if phases else StepPhase.UPDATE,
        peak_instruction=arena.peak_instruction,
        peak_classes=classes,
        host_classes=host_classes,
        device=totals,
        host=host_totals,
        on_chip_bytes=sum(each.size_bytes for each in dump.allocations if each.is_temp and space_of(each.color) is Space.ON_CHIP),
        timeline=timeline_of(dump, flow, arena, phases, fixed_bytes=fixed),
        schedule_length=len(dump.live.schedule),
        notes=notes,
    )


def check_totals(
    totals: SpaceTotals, compiler: MemoryBytes | None, *, peak_memory_bytes: int | None = None, elsewhere: int = 0
) -> tuple[SpaceTotals, tuple[str, ...]]:
    """Holds the dump's totals against the compiler's.

    Arguments, outputs and aliases must agree to the byte. Temporaries may exceed the arena by what the compiler reserves. libtpu
    adds the arena's fragmentation to the temporaries that it reports, which no device needs: a program whose reported total is
    above the memory compiles when its arena fits. With the compiler's own peak within the arena as witness, the arena is true.

    Args:
        totals: From the dump.
        compiler: From `memory_analysis()`; None = nothing to check (a refused program).
        peak_memory_bytes: The compiler's `peak_memory_in_bytes`.
        elsewhere: Bytes in host and on-chip memory, which libtpu counts in that peak.

    Returns:
        Totals with the reserved bytes, and notes.

    Raises:
        DumpError: If they disagree.
    """
    if compiler is None:
        return totals, ()
    for what in ("argument_bytes", "output_bytes", "alias_bytes"):
        if getattr(totals, what) != getattr(compiler, what):
            raise DumpError(_disagreement(what, getattr(totals, what), getattr(compiler, what)))
    reserved = compiler.temp_bytes - totals.arena_bytes
    if 0 <= reserved <= MAX_RESERVED_BYTES:
        return replace(totals, reserved_bytes=reserved), ()
    fixed = totals.argument_bytes + totals.output_bytes - totals.alias_bytes
    limit = fixed + totals.arena_bytes + elsewhere + MAX_RESERVED_BYTES
    is_within = peak_memory_bytes is not None and peak_memory_bytes <= limit
    if reserved > 0 and is_within and peak_memory_bytes and peak_memory_bytes >= totals.argument_bytes:
        note = (
            f"The compiler reports {compiler.temp_bytes} bytes of temporaries, its buffer assignment {totals.arena_bytes}: "
            f"libtpu adds fragmentation that no device needs; the buffer assignment counts."
        )
        return totals, (note,)
    raise DumpError(_disagreement("temp_bytes", totals.arena_bytes, compiler.temp_bytes))


def check_dump(totals: BufferTotals, *, device: MemoryBytes, host: MemoryBytes, peak_memory_bytes: int | None) -> None:
    """Holds a dump's totals against those of `memory_analysis()`, see `check_totals`.

    Raises:
        DumpError: If they disagree.
    """
    found = _as_space(totals.device, Space.DEVICE)
    check_totals(found, device, peak_memory_bytes=peak_memory_bytes, elsewhere=totals.elsewhere_bytes)
    check_totals(_as_space(totals.host, Space.HOST), host)


def _as_space(totals: MemoryBytes, space: Space) -> SpaceTotals:
    return SpaceTotals(
        space=space,
        argument_bytes=totals.argument_bytes,
        output_bytes=totals.output_bytes,
        alias_bytes=totals.alias_bytes,
        arena_bytes=totals.temp_bytes,
        live_bytes=totals.temp_bytes,
    )


def _disagreement(what: str, dumped: int, reported: int) -> str:
    return (
        f"{what}: the buffer assignment has {dumped}, the compiler reports {reported}. Both must come from the same compile, "
        f"into a dump folder of its own; else please report this program and the versions of jaxlib and libtpu."
    )


def _reserved(totals: SpaceTotals) -> PeakClass:
    return PeakClass(
        kind=PeakKind.COMPILER_RESERVED,
        name="counted by the compiler, not in its dump",
        layers=1,
        bytes=totals.reserved_bytes,
        logical_bytes=0,
        source="",
    )


def _explain_host(
    dump: Dump, evidence: Evidence, compiler: MemoryBytes | None
) -> tuple[SpaceTotals | None, tuple[PeakClass, ...]]:
    arena: Arena = arena_of(dump, Space.HOST)
    totals = totals_of(dump, Space.HOST, arena)
    if not totals.total_bytes:
        return None, ()
    totals, _ = check_totals(totals, compiler)
    return totals, peak_classes(dump, evidence, arena, schedule_phases(dump, evidence.flow), space=Space.HOST)
