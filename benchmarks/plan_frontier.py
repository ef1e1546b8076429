"""Plans under ten budgets, against every uniform policy over seven names, each compiled for a target that is not attached.

    python -m benchmarks.plan_frontier
    python -m benchmarks.plan_frontier --share 50 --log
    python -m benchmarks.plan_frontier --no-recompute

The step: 16 Llama layers (d 2048, 16 heads, 4 of keys and values, MLP 8192, vocabulary 32000), batch 8 x 4096, AdamW, cuDNN
attention, the loss in chunks; one H100; `--objective flops`. Budgets lie 5, 10, 20 … 90 % of the way from the total of `full` to
the smallest total of a uniform policy that repeats nothing. Uniform policies: all 128 subsets of q, k, v, attn (output and
statistics of the kernel), attn_out, gate, up, and MaxText's presets without offloading. First the plan where there is room:
nothing is repeated, in less than half of the bytes of `none`. 1 where a bound is missed.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import remat_kit
from benchmarks.plan_truth import miss_of, say
from models.config import llama3
from models.steps import StepOptions, make_step
from remat_kit.planning import PlanResult
from remat_kit.policy import Action
from remat_kit.presets import PRESETS
from remat_kit.records import CompareRow

STEP = "benchmarks.plan_frontier:llama"
CONFIG = llama3(16, 2048, 16, num_kv_heads=4, d_ff=8192, vocab_size=32_000)
NAMES = ("q", "k", "v", "attn", "attn_out", "gate", "up")
SHARES = (5, 10, 20, 30, 40, 50, 60, 70, 80, 90)
MOST_OF_NONE = 0.5
LEAST_USED, MOST_OF_UNIFORM, MOST_OF_PRESET = 0.97, 0.95, 0.65
MAX_WHOLE, MAX_COMPILES = 4, 12
GiB = 2**30


def llama(
    policies: remat_kit.Policies, devices: Sequence[Any], *, batch: int = 8, seq: int = 4096, layers: int = 16
) -> remat_kit.Step:
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
    uniform: int
    preset: int

    @property
    def faults(self) -> tuple[str, ...]:
        """Bounds of a single budget that it misses."""
        result = self.result
        checks = {
            "over the budget": not result.fits,
            "uses too little": result.compiled_total_bytes < LEAST_USED * result.budget_bytes,
            "a uniform policy is better": result.recompute_flops > self.uniform,
            "too many compiles": result.full_compiles > MAX_WHOLE or result.compiles > MAX_COMPILES,
        }
        return tuple(text for text, is_fault in checks.items() if is_fault)


def uniform_policies() -> list[str]:
    """All subsets of the names."""
    subsets = (names for count in range(len(NAMES) + 1) for names in itertools.combinations(NAMES, count))
    return [f"save({','.join(names)})" if names else "full" for names in subsets]


def rows_of(target: str, shares: Sequence[int]) -> list[Row]:
    """Plans for every budget."""
    policies = uniform_policies()
    presets = ["full", *(name for name, row in PRESETS.items() if row.action is Action.SAVE)]
    compared = remat_kit.compare(STEP, policies=[*policies, *presets[1:]], targets=[target], progress=_tell).rows
    found = {row.policy: row for row in compared}
    uniform = [found[policy] for policy in policies]
    low = _total(found["full"])
    high = min(_total(row) for row in uniform if row.recompute_flops == 0)
    rows = []
    for share in shares:
        budget = low + (high - low) * share // 100
        result = remat_kit.plan(STEP, target=target, budget=budget, objective="flops", progress=_tell).result
        least, preset = (_least_recompute(group, budget) for group in (uniform, [found[name] for name in presets]))
        rows.append(Row(share=share, result=result, uniform=least, preset=preset))
    return rows


def _total(row: CompareRow) -> int:
    assert row.total_bytes is not None, row.error
    return row.total_bytes


def _least_recompute(rows: Sequence[CompareRow], budget: int) -> int:
    return min(row.recompute_flops or 0 for row in rows if _total(row) <= budget)


def print_rows(rows: Sequence[Row], *, has_log: bool) -> bool:
    """Prints the table and says whether every bound holds."""
    say("share  budget GiB  compiled     used  predicted  compiles  recompute  of uniform  of preset  plan")
    ratios = [(row.result.recompute_flops / row.uniform, row.result.recompute_flops / row.preset) for row in rows]
    for row, (of_uniform, of_preset) in zip(rows, ratios, strict=True):
        result, total = row.result, row.result.compiled_total_bytes
        assert result.predicted_total_bytes is not None
        say(
            f"{row.share:4} % {result.budget_bytes / GiB:11.3f} {total / GiB:9.3f} {total / result.budget_bytes:8.1%} "
            f"{result.predicted_total_bytes / total - 1:+9.2%}  {result.full_compiles:2} of {result.compiles:2} "
            f"{result.recompute_flops / result.flops:10.2%} {of_uniform:11.3f} {of_preset:10.3f}  {result.plan}"
            + "".join(f"  <- {fault}" for fault in row.faults)
        )
        for entry in result.log if has_log else ():
            say(f"          {entry.depth or 'all':>4} {entry.total_bytes / GiB:8.3f} {miss_of(entry)}  {entry.plan}")
    means = tuple(statistics.mean(column) for column in zip(*ratios, strict=True))
    say(f"mean of the best uniform policy {means[0]:.3f}, of the best preset {means[1]:.3f}")
    return means[0] <= MOST_OF_UNIFORM and means[1] <= MOST_OF_PRESET and not any(row.faults for row in rows)


def without_recompute(target: str) -> bool:
    """Prints the plan where there is room for everything worth keeping, against no rematerialization; whether it is good.

    The backward pass of flash attention needs its output and its statistics: a plan that repeats nothing keeps both.
    """
    result = remat_kit.plan(STEP, target=target, budget="99%", objective="flops", progress=_tell).result
    none = _total(remat_kit.compare(STEP, policies=["none"], targets=[target], progress=_tell).rows[0])
    share = result.compiled_total_bytes / none
    say(
        f"no recompute: {result.compiled_total_bytes / GiB:.3f} GiB, {share:.1%} of the {none / GiB:.3f} GiB of `none`; repeats "
        f"{result.recompute_flops} FLOPs; {result.full_compiles} of {result.compiles} compiles; {result.plan}"
    )
    return result.fits and result.recompute_flops == 0 and share < MOST_OF_NONE and "attn" in result.plan


def _tell(what: str, index: int, total: int) -> None:
    sys.stderr.write(f"{index + 1:4} of {total}  {what}\n")


def main() -> int:
    """Runs what the command line asks for; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--share", type=int, action="append", choices=SHARES)
    parser.add_argument("--log", action="store_true", help="every compile of every plan, and by how much it was mispredicted")
    parser.add_argument("--no-recompute", action="store_true", help="only the plan with room for everything worth keeping")
    options = parser.parse_args()
    is_good = without_recompute(options.target)
    if not options.no_recompute:
        is_good &= print_rows(rows_of(options.target, options.share or SHARES), has_log=options.log)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
