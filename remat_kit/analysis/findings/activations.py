"""Findings about activations: whole logits, offloading that does not pay, a program too small to tell anything.

In: `StepFacts`. Out: `Finding`.
"""

import math
from collections.abc import Iterator

from remat_kit.analysis.findings.facts import StepFacts, is_worth_saying, peak_lines
from remat_kit.analysis.findings.plans import without_offload
from remat_kit.analysis.shapes import arrays_of
from remat_kit.findings import Change, Finding, FindingKind, Remedy
from remat_kit.memory import PeakClass, PeakKind
from remat_kit.units import format_bytes

_NEARLY_WHOLE = 0.99


def whole_logits(facts: StepFacts) -> Iterator[Finding]:
    """Logits of all tokens at once at the peak."""
    lines = [line for line in peak_lines(facts, PeakKind.LOGITS) if _share_of_logits(facts, line) >= _NEARLY_WHOLE]
    num_bytes = sum(line.bytes for line in lines)
    if not lines or not is_worth_saying(facts, num_bytes):
        return
    offered = next((each for each in facts.offers if _is_about_loss(each)), None)
    text = "Compute the loss in chunks of tokens, in a scan whose body is rematerialized or makes its gradient at once."
    shapes = dict.fromkeys(line.shape.partition("{")[0] for line in lines)
    yield Finding(
        kind=FindingKind.WHOLE_LOGITS,
        names=tuple(dict.fromkeys(line.name for line in lines)),
        message=f"Logits of all tokens are held at once: {' and '.join(shapes)} on each device.",
        bytes_at_stake=num_bytes,
        source=next((line.source for line in lines if line.source), ""),
        remedy=offered or Remedy(text=text),
    )


def _share_of_logits(facts: StepFacts, line: PeakClass) -> float:
    """Part of (tokens x vocabulary) that an array holds, over all devices."""
    tables = [each for each in facts.arguments if each.kind is PeakKind.PARAMETERS and len(each.global_dims) == 2]
    vocabulary = max((max(each.global_dims) for each in tables), default=0)
    batches = [each.global_dims for each in facts.arguments if each.kind is PeakKind.BATCH]
    tokens = max((math.prod(dims) for dims in batches), default=0)
    elements = max((array.num_elements for array in arrays_of(line.shape)), default=0)
    return elements * facts.graph.num_devices / (vocabulary * tokens) if vocabulary and tokens else 0.0


def _is_about_loss(remedy: Remedy) -> bool:
    words = remedy.text.lower()
    return "loss" in words or "logits" in words


def offload_grows_device(facts: StepFacts) -> Iterator[Finding]:
    """A suspicion: the same policy without offloading may take less device memory. Only a compile tells."""
    changed = without_offload(facts.policy)
    if changed is None or facts.memory.host is None:
        return
    yield Finding(
        kind=FindingKind.OFFLOAD_GROWS_DEVICE,
        names=tuple(dict.fromkeys(line.name for line in facts.memory.host_classes)),
        message=f"Offloading puts {format_bytes(facts.memory.host.total_bytes)} into host memory and lowers no device memory.",
        remedy=Remedy(text=f"Recompute those values instead: {changed}.", change=Change(policy=changed)),
    )


def on_chip_toy(facts: StepFacts) -> Iterator[Finding]:
    """All temporaries fit into the chip's own fast memory: what a policy saves does not show."""
    totals = facts.memory.device
    if facts.platform != "tpu" or facts.memory.on_chip_bytes <= totals.arena_bytes:
        return
    yield Finding(
        kind=FindingKind.ON_CHIP_TOY,
        message=f"This step is so small that most of its temporaries ({format_bytes(facts.memory.on_chip_bytes)}) lie in the "
        f"chip's fast memory and only {format_bytes(totals.arena_bytes)} in device memory: policies can't be compared by it.",
        remedy=Remedy(text="Ask for the size that is to be trained."),
    )
