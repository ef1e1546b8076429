"""Plans under ten budgets, against every uniform policy over seven names, each compiled for a target that is not attached.

    python -m benchmarks.plan_frontier
    python -m benchmarks.plan_frontier --share 50 --log

The step: 16 Llama layers (d 2048, 16 heads, 4 of keys and values, MLP 8192, vocabulary 32000), batch 8 x 4096, AdamW, cuDNN
attention, the loss in chunks; one H100; `--objective flops`. Budgets lie 5, 10, 20 … 90 % of the way from the total of `full` to
the smallest total of a uniform policy that repeats nothing. Uniform policies: all 128 subsets of q, k, v, attn (output and
statistics of the kernel), attn_out, gate, up, and MaxText's presets without offloading. 1 where a bound is missed.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat_kit.compile.environment import prepare_environment

prepare_environment()

from benchmarks.plan_measure import PlannedStep, planned_step  # noqa: E402
from benchmarks.plan_truth import miss_of  # noqa: E402
from models.config import llama3  # noqa: E402
from models.steps import StepOptions, make_step  # noqa: E402
from remat_kit import Policies, Step  # noqa: E402
from remat_kit.planner.search import find_plan  # noqa: E402
from remat_kit.planning import Measured, Objective, PlanResult  # noqa: E402
from remat_kit.policy import Action  # noqa: E402
from remat_kit.presets import PRESETS  # noqa: E402

CONFIG = llama3(16, 2048, 16, num_kv_heads=4, d_ff=8192, vocab_size=32_000)
NAMES = ("q", "k", "v", "attn", "attn_out", "gate", "up")
SHARES = (5, 10, 20, 30, 40, 50, 60, 70, 80, 90)
LEAST_USED, MOST_OF_UNIFORM, MOST_OF_PRESET = 0.97, 0.95, 0.65
MAX_WHOLE, MAX_COMPILES = 4, 12
GiB = 2**30


def llama(policies: Policies, devices: Sequence[Any], *, batch: int = 8, seq: int = 4096, layers: int = 16) -> Step:
    """The training step that this benchmark plans for."""
    return make_step(CONFIG, policies, devices, StepOptions(batch=batch, seq=seq, layers=layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A budget.

    Attributes:
        share: Percent of the way from full remat to no recompute.
        result: The plan.
        uniform: The least recomputation of the uniform policies that fit.
        preset: The same of the presets.
    """

    share: int
    result: PlanResult
    uniform: Measured
    preset: Measured

    @property
    def faults(self) -> tuple[str, ...]:
        """Bounds of a single budget that it misses."""
        result = self.result
        checks = {
            "over the budget": not result.fits,
            "uses too little": result.compiled_total_bytes < LEAST_USED * result.budget_bytes,
            "a uniform policy is better": result.recompute_flops > self.uniform.recompute_flops,
            "too many compiles": result.full_compiles > MAX_WHOLE or result.compiles > MAX_COMPILES,
        }
        return tuple(text for text, is_fault in checks.items() if is_fault)


def uniform_policies() -> list[str]:
    """All subsets of the names."""
    subsets = (names for count in range(len(NAMES) + 1) for names in itertools.combinations(NAMES, count))
    return [f"save({','.join(names)})" if names else "full" for names in subsets]


def measured(step: PlannedStep, policies: Sequence[str]) -> list[Measured]:
    """Each policy, compiled whole."""
    found = []
    for number, policy in enumerate(policies):
        found.append(step.measure(policy, None))
        _tell(f"{number + 1:4} of {len(policies)}  {policy:40} {found[-1].total_bytes / GiB:8.3f} GiB")
    return found


def rows_of(step: PlannedStep, shares: Sequence[int]) -> list[Row]:
    """Plans for every budget."""
    uniform = measured(step, uniform_policies())
    presets = measured(step, ["full", *(name for name, row in PRESETS.items() if row.action is Action.SAVE)])
    low = uniform[0].total_bytes
    high = min(item.total_bytes for item in uniform if item.recompute_flops == 0)
    stacks = step.stacks(Objective.FLOPS)
    rows = []
    for share in shares:
        budget = low + (high - low) * share // 100
        result = find_plan(stacks, budget_bytes=budget, measure=step.measure, objective=Objective.FLOPS)
        rows.append(Row(share=share, result=result, uniform=_best(uniform, budget), preset=_best(presets, budget)))
        _tell(f"{share} %: {result.plan}")
    return rows


def _best(found: Sequence[Measured], budget: int) -> Measured:
    return min((item for item in found if item.total_bytes <= budget), key=lambda item: item.recompute_flops)


def print_rows(rows: Sequence[Row], *, has_log: bool) -> bool:
    """Prints the table and says whether every bound holds."""
    _say("share  budget GiB  compiled     used  predicted  compiles  recompute  of uniform  of preset  plan")
    ratios = [
        (row.result.recompute_flops / row.uniform.recompute_flops, row.result.recompute_flops / row.preset.recompute_flops)
        for row in rows
    ]
    for row, (of_uniform, of_preset) in zip(rows, ratios, strict=True):
        result, total = row.result, row.result.compiled_total_bytes
        assert result.predicted_total_bytes is not None
        _say(
            f"{row.share:4} % {result.budget_bytes / GiB:11.3f} {total / GiB:9.3f} {total / result.budget_bytes:8.1%} "
            f"{result.predicted_total_bytes / total - 1:+9.2%}  {result.full_compiles:2} of {result.compiles:2} "
            f"{result.recompute_flops / result.flops:10.2%} {of_uniform:11.3f} {of_preset:10.3f}  {result.plan}"
            + "".join(f"  <- {fault}" for fault in row.faults)
        )
        for entry in result.log if has_log else ():
            _say(f"          {entry.depth or 'all':>4} {entry.total_bytes / GiB:8.3f} {miss_of(entry)}  {entry.plan}")
    means = tuple(statistics.mean(column) for column in zip(*ratios, strict=True))
    _say(f"mean of the best uniform policy {means[0]:.3f}, of the best preset {means[1]:.3f}")
    return means[0] <= MOST_OF_UNIFORM and means[1] <= MOST_OF_PRESET and not any(row.faults for row in rows)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> int:
    """Runs what the command line asks for; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--share", type=int, action="append", choices=SHARES)
    parser.add_argument("--log", action="store_true", help="every compile of every plan, and by how much it was mispredicted")
    options = parser.parse_args()
    step = planned_step("benchmarks.plan_frontier:llama", target=options.target, options={})
    return 0 if print_rows(rows_of(step, options.share or SHARES), has_log=options.log) else 1


if __name__ == "__main__":
    sys.exit(main())
