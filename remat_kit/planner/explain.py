"""Why a plan is what it is: a row per name with what would flip it, what fills the memory, and one sentence to repeat."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_kit.planner.blocks import unpriced
from remat_kit.planner.closure import LayerChoice, close
from remat_kit.planner.frontier import FrontierPoint, frontier
from remat_kit.planner.layout import Layout, LayoutSegment, PlannedStack
from remat_kit.planner.ledger import Ledger
from remat_kit.planner.model import MemoryModel, layer_features, prior, working_features
from remat_kit.planner.solve import cost_of
from remat_kit.planning import Decision, Measured, Objective, Part, PlanResult
from remat_kit.policy import Action, NoRemat
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
        rows += [_always_kept(stack, name) for name in stack.block.input_names]
        rows += [_decision(layout, stack, name, model, points) for name in stack.block.names]
    return tuple(rows)


def _always_kept(stack: PlannedStack, name: str) -> Decision:
    return Decision(
        stack=stack.name,
        name=name,
        num_bytes=stack.block.input_bytes,
        num_kept=stack.num_layers,
        num_layers=stack.num_layers,
        action=Action.SAVE,
        is_live_at_peak=None,
        recompute_flops=0,
        recompute_s=0.0,
        flip="kept at every budget: it is the input of the layer",
    )


def _decision(layout: Layout, stack: PlannedStack, name: str, model: MemoryModel, points: Sequence[FrontierPoint]) -> Decision:
    num_kept = kept_layers(layout, stack, name)
    is_offloaded = any(name in segment.choice.offloaded for segment in _segments(layout, stack))
    action = Action.RECOMPUTE if not num_kept else Action.OFFLOAD if is_offloaded else Action.SAVE
    flops, seconds = _spared(layout, stack, name)
    flip = flip_of(stack, name, num_kept=num_kept, flops=flops, points=points)
    if flops and not num_kept and all(_is_none(segment.choice) for segment in _segments(layout, stack)):
        flops, seconds, flip = 0, 0.0, "no budget: without recomputation, what is made of it is kept"
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
        flip=flip,
    )


def kept_layers(layout: Layout, stack: PlannedStack, name: str) -> int:
    """Layers of a stack that keep a name, on device or host; those without rematerialization keep what is read."""
    return sum(
        segment.num_layers
        for segment in _segments(layout, stack)
        if name in (*segment.choice.saved, *segment.choice.offloaded) or (_is_none(segment.choice) and stack.block.reads(name))
    )


def _segments(layout: Layout, stack: PlannedStack) -> list[LayoutSegment]:
    return [segment for stack_name, segment in layout.segments if stack_name == stack.name]


def _is_none(choice: LayerChoice) -> bool:
    return isinstance(choice.policy, NoRemat)


def _spared(layout: Layout, stack: PlannedStack, name: str) -> tuple[int, float]:
    """What keeping a name spares in the last segment (that keeps most), all else being as it is there."""
    last, names = _segments(layout, stack)[-1].choice, stack.block.names
    others = {each for each in names if stack.block.reads(each)} if _is_none(last) else {*last.saved, *last.offloaded}
    kept = np.array([[other in others - {name} for other in names]] * 2)
    kept[1, names.index(name)] = True
    closures = close(stack.block, kept)
    return int(closures.flops[0] - closures.flops[1]), float(closures.seconds[0] - closures.seconds[1])


def flip_of(stack: PlannedStack, name: str, *, num_kept: int, flops: int, points: Sequence[FrontierPoint]) -> str:
    """What would change the decision about a name, from the plans for other budgets."""
    if num_kept:
        below = max((point.total_bytes for point in points if _repeats_everywhere(point.layout, stack, name)), default=None)
        return "kept at every budget" if below is None else f"recomputed in all layers at {format_bytes(below)}"
    above = min((point.total_bytes for point in points if kept_layers(point.layout, stack, name)), default=None)
    if above is not None:
        return f"kept from a total of {format_bytes(above)} on"
    if not flops and not stack.block.reads(name):
        return "no budget: the backward pass does not read it"
    return "no budget: other names spare the same for fewer bytes"


def _repeats_everywhere(layout: Layout, stack: PlannedStack, name: str) -> bool:
    """Whether every layer may run a name's operations again: none keeps it, and each rematerializes."""
    return not kept_layers(layout, stack, name) and not any(_is_none(segment.choice) for segment in _segments(layout, stack))


def parts_of(layout: Layout, *, model: MemoryModel, total_bytes: int) -> tuple[Part, ...]:
    """What fills the memory; what the model can't place goes to the part outside the layers."""
    parts: list[tuple[str, float]] = []
    for name, segments in layout.stacks:
        own = sum(segment.num_layers for segment in segments) * model.coefficient(f"layers {name}")
        kept = sum(
            amount * model.coefficient(feature) * segment.num_layers
            for segment in segments
            for feature, amount in layer_features(name, segment.choice, is_whole=True).items()
            if not feature.startswith("layers ")
        )
        parts.append((f"{name}: parameters, optimizer state, gradients and inputs of the layers", own))
        parts.append((f"{name}: values kept for the backward pass", kept))
    stack, widest = max(layout.segments, key=lambda pair: pair[1].choice.working_bytes)
    working = sum(amount * model.coefficient(feature) for feature, amount in working_features(stack, widest.choice).items())
    parts.append(("working set of a layer's backward pass", working))
    placed = _within(total_bytes, parts)
    rest = total_bytes - sum(part.num_bytes for part in placed)
    return (Part(label="outside the layers (embedding, loss, their state and gradients)", num_bytes=rest), *placed)


def _within(total_bytes: int, parts: Sequence[tuple[str, float]]) -> list[Part]:
    """Parts of at least 0 that together are no more than the total: a fitted model may err a little either way."""
    scale = min(1.0, total_bytes / max(1.0, sum(max(0.0, amount) for _, amount in parts)))
    return [Part(label=label, num_bytes=int(max(0.0, amount) * scale)) for label, amount in parts]


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
    if _is_none(choice):
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
