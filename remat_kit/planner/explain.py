"""Why a plan is what it is: a row per name with what would flip it, what fills the memory, and one sentence to repeat."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_kit.planner.blocks import unpriced
from remat_kit.planner.closure import LayerChoice, close
from remat_kit.planner.frontier import FrontierPoint, frontier
from remat_kit.planner.layout import Layout, PlannedStack
from remat_kit.planner.ledger import Ledger
from remat_kit.planner.model import MemoryModel, layer_features, prior, working_features
from remat_kit.planner.solve import cost_of
from remat_kit.planning import Decision, Measured, Objective, Part, PlanResult
from remat_kit.policy import Action
from remat_kit.units import format_bytes, format_scaled

LIVE_PART = 0.2
"""A name counts as live at the peak when the compiler keeps more than this part of its traced bytes there."""


def explained(
    layout: Layout,
    measured: Measured,
    *,
    stacks: Sequence[PlannedStack],
    budget_bytes: int,
    objective: Objective,
    ledger: Ledger,
    before: MemoryModel | None,
) -> PlanResult:
    """Puts a measured layout and everything a reader wants to know about it into a `PlanResult`.

    Args:
        layout: The plan.
        measured: What its compile said.
        stacks: The stacks.
        budget_bytes: Of a device.
        objective: What was made least of.
        ledger: Every measurement.
        before: The model as it was before any compile at full depth; None = nothing had been measured.
    """
    model = ledger.model()
    missing = max(0, measured.total_bytes - budget_bytes)
    result = PlanResult(
        plan=str(layout),
        fits=not missing,
        budget_bytes=budget_bytes,
        predicted_total_bytes=before.predict(layout) if before is not None else None,
        compiled_total_bytes=measured.total_bytes,
        missing_bytes=missing,
        host_bytes=measured.host_bytes,
        flops=measured.flops,
        recompute_flops=measured.recompute_flops,
        recompute_s=cost_of(layout, stacks, Objective.TIME),
        objective=objective,
        full_compiles=len(ledger.whole),
        compiles=len(ledger.log),
        decisions=decisions_of(layout, stacks, model=model, points=frontier(stacks, model=model, objective=objective)),
        parts=parts_of(layout, model=model, total_bytes=measured.total_bytes),
        sentence="",
        log=tuple(ledger.log),
        notes=_notes(layout, stacks, measured),
    )
    return dataclasses.replace(result, sentence=sentence_of(result, layout))


def decisions_of(
    layout: Layout, stacks: Sequence[PlannedStack], *, model: MemoryModel, points: Sequence[FrontierPoint]
) -> tuple[Decision, ...]:
    """One row for each name of each stack.

    Args:
        layout: The plan.
        stacks: The stacks.
        model: Says what is live at the peak.
        points: Plans for other budgets, least first: they say what would flip a decision.
    """
    rows = []
    for stack in stacks:
        for name in stack.block.names:
            rows.append(_decision(layout, stack, name, model, points))
    return tuple(rows)


def _decision(layout: Layout, stack: PlannedStack, name: str, model: MemoryModel, points: Sequence[FrontierPoint]) -> Decision:
    num_kept = kept_layers(layout, stack.name, name)
    is_offloaded = any(name in segment.choice.offloaded for stack_name, segment in layout.segments if stack_name == stack.name)
    action = Action.RECOMPUTE if not num_kept else Action.OFFLOAD if is_offloaded else Action.SAVE
    flops, seconds = _spared(layout, stack, name)
    coefficient = model.coefficients.get(f"kept {stack.name} {name}")
    return Decision(
        stack=stack.name,
        name=name,
        num_bytes=stack.block.name_bytes(name),
        num_kept=num_kept,
        num_layers=stack.num_layers,
        action=action,
        is_live_at_peak=None if coefficient is None else coefficient > LIVE_PART * prior("kept")[0],
        recompute_flops=flops,
        recompute_s=seconds,
        flip=flip_of(stack, name, num_kept=num_kept, flops=flops, points=points),
    )


def kept_layers(layout: Layout, stack: str, name: str) -> int:
    """Layers of a stack that keep a name, on device or host."""
    return sum(
        segment.num_layers
        for stack_name, segment in layout.segments
        if stack_name == stack and name in (*segment.choice.saved, *segment.choice.offloaded)
    )


def _spared(layout: Layout, stack: PlannedStack, name: str) -> tuple[int, float]:
    """What keeping a name spares in the last segment (that keeps most), all else being as it is there."""
    last = [segment for stack_name, segment in layout.segments if stack_name == stack.name][-1].choice
    others = {*last.saved, *last.offloaded} - {name}
    kept = np.array([[other in others for other in stack.block.names]] * 2)
    kept[1, stack.block.names.index(name)] = True
    closures = close(stack.block, kept)
    return int(closures.flops[0] - closures.flops[1]), float(closures.seconds[0] - closures.seconds[1])


def flip_of(stack: PlannedStack, name: str, *, num_kept: int, flops: int, points: Sequence[FrontierPoint]) -> str:
    """What would change the decision about a name, from the plans for other budgets."""
    counts = [(point.total_bytes, kept_layers(point.layout, stack.name, name)) for point in points]
    if num_kept:
        below = max((total for total, kept in counts if kept == 0), default=None)
        return "kept at every budget" if below is None else f"recomputed in all layers at {format_bytes(below)}"
    above = min((total for total, kept in counts if kept), default=None)
    if above is not None:
        return f"kept from a total of {format_bytes(above)} on"
    reads = any(value.is_read for value in stack.block.values if value.name == name)
    if not flops and not reads:
        return "no budget: the backward pass does not read it"
    return "no budget: other names spare the same for fewer bytes"


def parts_of(layout: Layout, *, model: MemoryModel, total_bytes: int) -> tuple[Part, ...]:
    """What fills the memory; what the model can't place goes to the part outside the layers."""
    parts = []
    for name, segments in layout.stacks:
        own = sum(segment.num_layers for segment in segments) * model.coefficient(f"layers {name}")
        kept = sum(
            amount * model.coefficient(feature) * segment.num_layers
            for segment in segments
            for feature, amount in layer_features(name, segment.choice, is_whole=True).items()
            if not feature.startswith("layers ")
        )
        parts.append(Part(label=f"{name}: parameters, optimizer state, gradients and inputs of the layers", num_bytes=round(own)))
        parts.append(Part(label=f"{name}: values kept for the backward pass", num_bytes=round(kept)))
    stack, widest = max(layout.segments, key=lambda pair: pair[1].choice.working_bytes)
    working = sum(amount * model.coefficient(feature) for feature, amount in working_features(stack, widest.choice).items())
    parts.append(Part(label="working set of a layer's backward pass", num_bytes=round(working)))
    rest = total_bytes - sum(part.num_bytes for part in parts)
    return (Part(label="outside the layers (embedding, loss, their state and gradients)", num_bytes=rest), *parts)


def sentence_of(result: PlanResult, layout: Layout) -> str:
    """The plan in a sentence that a person can repeat."""
    total, budget = format_bytes(result.compiled_total_bytes), format_bytes(result.budget_bytes)
    if not result.fits:
        largest = max(result.parts, key=lambda part: part.num_bytes)
        return (
            f"Nothing fits: the smallest plan found, {result.plan!r}, takes {total}, {format_bytes(result.missing_bytes)} more "
            f"than the budget of {budget}; the largest part is {largest.label} with {format_bytes(largest.num_bytes)}."
        )
    work = f"repeats {format_scaled(result.recompute_flops, 'FLOP')}" if result.recompute_flops else "repeats no matmul"
    share = f" ({result.recompute_flops / result.flops:.1%} of the step)" if result.recompute_flops else ""
    return f"{_kept_sentence(layout)}; the backward pass {work}{share}, and the step takes {total} of {budget}."


def _kept_sentence(layout: Layout) -> str:
    phrases = []
    for name, segments in layout.stacks:
        listed = [
            f"{segment.num_layers} {'layer keeps' if segment.num_layers == 1 else 'layers keep'} {_words(segment.choice)}"
            for segment in segments
        ]
        phrases.append((f"In {name}, " if len(layout.stacks) > 1 else "") + " and ".join(listed))
    return "; ".join(phrases)


def _words(choice: LayerChoice) -> str:
    if str(choice.policy) == "none":
        return "everything"
    words = [", ".join(choice.saved)] if choice.saved else []
    words += [f"{', '.join(choice.offloaded)} in host memory"] if choice.offloaded else []
    return " and ".join(words) or "only their input"


def _notes(layout: Layout, stacks: Sequence[PlannedStack], measured: Measured) -> tuple[str, ...]:
    notes = [note for stack in stacks for note in stack.block.notes]
    for stack in stacks:
        unknown = unpriced(stack.block)
        if unknown:
            notes.append(
                f"The price of {', '.join(unknown)} in {stack.name} is not known: it counts as more than the rest of a layer."
            )
    predicted = round(cost_of(layout, stacks, Objective.FLOPS))
    if abs(predicted - measured.recompute_flops) > 0.01 * max(measured.flops, 1):
        notes.append(
            f"The layers were expected to repeat {format_scaled(predicted, 'FLOP')}, the traced step repeats "
            f"{format_scaled(measured.recompute_flops, 'FLOP')}: something outside the model is recomputed, or a price is wrong."
        )
    return tuple(dict.fromkeys(notes))
