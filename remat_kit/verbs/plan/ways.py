"""What would make a step fit when no plan does: each change is compiled under the leanest plan, none is guessed.

Changes come from the step's knobs (half the batch, and half of that), from the alternatives that the factory declares
(micro-batches, smaller chunks of the loss, adapters …), from host memory for the layers' inputs, and from the target (twice the
devices).
"""

import dataclasses
import itertools
from collections.abc import Iterator

from remat_kit.compile.pool import Worker
from remat_kit.planner.ways import Change, ways_out
from remat_kit.planning import WayOut
from remat_kit.targets import Target, load_rows, parse_target
from remat_kit.verbs.plan.described import StepBlocks
from remat_kit.verbs.plan.session import PlanQuestion, Session, compile_plan

MAX_MEASURED = 10
MAX_HALVINGS = 3
BLOCK_INPUT = "block_input"  # see remat_kit.apply.stack


def ways_for(session: Session, asked: PlanQuestion, blocks: StepBlocks, *, plan: str) -> tuple[WayOut, ...]:
    """Measures ways out.

    Args:
        session: Whose worker compiles.
        asked: What did not fit.
        blocks: The step.
        plan: Its smallest plan.

    Returns:
        Those that fit first.
    """
    changes = itertools.chain(
        _halved_batches(session, asked, blocks, plan),
        _alternatives(session, asked, blocks, plan),
        _offloaded_inputs(session, asked, blocks),
        _more_devices(asked, plan),
    )
    return ways_out(changes, budget_bytes=asked.budget_bytes, max_measured=MAX_MEASURED)


def _changed(session: Session, asked: PlanQuestion, plan: str, text: str, options: dict[str, str]) -> Change:
    changed = asked.with_options(options)
    return Change(text=text, smallest_total=lambda: compile_plan(session, changed, plan, what=text).total_bytes)


def _halved_batches(session: Session, asked: PlanQuestion, blocks: StepBlocks, plan: str) -> Iterator[Change]:
    option = dict(blocks.knobs).get("batch")
    given = dict(blocks.options).get(option or "", "")
    if option is None or not given.isdecimal():
        return
    batch = int(given)
    for _ in range(MAX_HALVINGS):
        if batch % 2:
            return
        batch //= 2
        yield _changed(session, asked, plan, f"{option} {batch} instead of {given}", {option: str(batch)})


def _alternatives(session: Session, asked: PlanQuestion, blocks: StepBlocks, plan: str) -> Iterator[Change]:
    for text, options in blocks.alternatives:
        yield _changed(session, asked, plan, text, dict(options))


def _offloaded_inputs(session: Session, asked: PlanQuestion, blocks: StepBlocks) -> Iterator[Change]:
    """The inputs of all layers but the last in host memory: the one thing that the leanest plan still keeps."""
    if (
        asked.modules
        or asked.target.platform == "cpu"
        or any(not stack.accepts_mixed or stack.num_layers < 2 for stack in blocks.stacks)
    ):
        return
    parts = [(stack.name, f"offload({BLOCK_INPUT})*{stack.num_layers - 1} | full*1") for stack in blocks.stacks]
    plan = parts[0][1] if len(parts) == 1 else "; ".join(f"{name}={part}" for name, part in parts)
    yield _changed(session, asked, plan, f"the inputs of the layers in host memory ({plan})", {})


def _more_devices(asked: PlanQuestion, plan: str) -> Iterator[Change]:
    wider = wider_target(asked.target)
    if wider is None:
        return

    def smallest_total() -> int:
        rows = load_rows(asked.question.targets_file)
        question = dataclasses.replace(asked.question, target=wider)
        changed = dataclasses.replace(asked, question=question, target=parse_target(wider, rows))
        with Worker() as worker:
            return compile_plan(Session(worker=worker), changed, plan, what=wider).total_bytes

    yield Change(text=f"twice the devices ({wider}), the same batch in all", smallest_total=smallest_total)


def wider_target(target: Target) -> str | None:
    """The text of the same kind with twice the devices; None = there is none to name.

    Example:
        >>> wider_target(parse_target("h100:2x8", load_rows())), wider_target(parse_target("v5p:2x2x1", load_rows()))
        ('h100:4x8', 'v5p:2x2x2')
    """
    if target.platform == "attached":
        return None
    if target.tpu is not None:
        return _wider_slice(target, target.tpu.topology_rank)
    *hosts, devices = target.topology or (1,)
    if target.platform == "cuda" and (hosts or devices >= 8):
        return f"{target.kind}:{2 * (hosts[0] if hosts else 1)}x{devices}"
    return f"{target.kind}:{2 * devices}"


def _wider_slice(target: Target, rank: int) -> str:
    if target.num_devices == 1 or not target.topology:
        smallest = (2, 2, 1)[:rank]
        return f"{target.kind}:{'x'.join(map(str, smallest))}"
    shape = list(target.topology)
    shape[shape.index(min(shape))] *= 2
    return f"{target.kind}:{'x'.join(map(str, shape))}"
