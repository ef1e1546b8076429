"""How well a plan's total is predicted before its first whole compile, on the field's models and on one that nobody edits.

    python -m benchmarks.plan_truth
    python -m benchmarks.plan_truth --case gpt2 --log

Each plan: its budget (a part of the way from the total of full remat to that of none), the total predicted
from compiles at small depths, the compiled one, and how many compiles it took. `gpt2_flax` is `FlaxGPT2LMHeadModel` of
transformers, unmodified: 12 layers that are modules one after the other, planned by the paths of their modules. 1 where a
prediction is off by more than 2 %, a plan is over its budget or took too many compiles.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_kit
from remat_kit import Knobs, Policies, Step
from remat_kit.planning import LogEntry, PlanResult

MOST_OFF = 0.02
MAX_WHOLE, MAX_COMPILES = 4, 12
GiB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step on a target.

    Attributes:
        step: Its factory.
        target: Its text.
        options: Of the factory.
        pattern: Of the layers of a model that nobody edits.
        shares: Budgets, in percent of the way from the total of full remat to that of none.
    """

    step: str
    target: str
    options: dict[str, object] = field(default_factory=dict)
    pattern: str | None = None
    shares: tuple[int, ...] = (20, 50, 80)


GPT2_FLAX = "benchmarks.plan_truth:gpt2_flax"
CASES = {
    "gpt2_small h100": Case(step="models:gpt2_small", target="h100"),
    "gpt2_small v5e": Case(step="models:gpt2_small", target="v5e", shares=(50,)),
    "gpt2_flax h100": Case(step=GPT2_FLAX, target="h100", pattern="transformer/h/*", shares=(40,)),
    "llama3_8b h100:8": Case(step="models:llama3_8b", target="h100:8", shares=(30, 60)),
    "llama3_8b v5p:2x2x4": Case(step="models:llama3_8b", target="v5p:2x2x4", shares=(50,)),
}


def gpt2_flax(policies: Policies, devices: Sequence[Any], *, batch: int = 8, seq: int = 1024, layers: int = 12) -> Step:
    """A training step of the unmodified Flax GPT-2 of transformers: AdamW, bf16 computation, f32 parameters."""
    del policies, devices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces the end of its Flax models
        import transformers
        from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModel

        config = transformers.GPT2Config(n_layer=layers, n_positions=seq)
        model = FlaxGPT2LMHeadModel(config, dtype=jnp.bfloat16, _do_init=False)
    params = jax.eval_shape(lambda key: model.init_weights(key, (1, 1)), jax.random.key(0))
    optimizer = optax.adamw(1e-4)

    def loss(params: Any, tokens_BT: jax.Array) -> jax.Array:
        logits_BTV = model(tokens_BT, params=params).logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV[:, :-1], tokens_BT[:, 1:]).mean()

    def train_step(params: Any, state: Any, tokens_BT: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens_BT)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return Step(
        fn=train_step,
        args=(params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((batch, seq), jnp.int32)),
        donate=(0, 1),
        roles=("parameters", "optimizer_state", "batch"),
        knobs=Knobs(batch="batch", seq="seq", depth="layers"),
    )


def plans_of(case: Case) -> list[PlanResult]:
    """A plan for every budget of a case."""
    wraps = () if case.pattern is None else (case.pattern,)
    plain = ("full", "none")
    rows = remat_kit.compare(
        case.step,
        policies=() if wraps else plain,
        wraps=[{pattern: policy} for policy in plain for pattern in wraps],
        targets=[case.target],
        options=case.options,
    ).rows
    low, high = (row.total_bytes or 0 for row in rows)
    assert low and high, [row.error for row in rows]
    budgets = [low + (high - low) * share // 100 for share in case.shares]
    return [
        remat_kit.plan(
            case.step, target=case.target, budget=budget, wraps=wraps, objective="flops", options=case.options, progress=_tell
        ).result
        for budget in budgets
    ]


def print_plans(name: str, case: Case, *, has_log: bool) -> bool:
    """Prints a case's plans; says whether every bound holds."""
    is_good = True
    for share, result in zip(case.shares, plans_of(case), strict=True):
        predicted, total = result.predicted_total_bytes, result.compiled_total_bytes
        off = float("nan") if predicted is None else predicted / total - 1
        counts = result.full_compiles <= MAX_WHOLE and result.compiles <= MAX_COMPILES
        row_is_good = abs(off) <= MOST_OFF and result.fits and counts
        is_good &= row_is_good
        say(
            f"{name:20} {share:3} % budget {result.budget_bytes / GiB:8.3f} GiB, compiled {total / GiB:8.3f} "
            f"({total / result.budget_bytes:6.1%}), predicted {off:+7.2%}, {result.full_compiles} of {result.compiles} whole, "
            f"recompute {result.recompute_flops / result.flops:6.2%}  {result.plan}{'' if row_is_good else '  <- missed'}"
        )
        for entry in result.log if has_log else ():
            say(f"    {entry.depth or 'all':>4} {entry.total_bytes / GiB:8.3f} {miss_of(entry)}  {entry.plan}")
    return is_good


def miss_of(entry: LogEntry) -> str:
    """By how much a compile was mispredicted by those before it."""
    return "       " if entry.predicted_bytes is None else f"{entry.predicted_bytes / entry.total_bytes - 1:+7.2%}"


def say(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _tell(what: str, index: int, total: int) -> None:
    sys.stderr.write(f"{index + 1:4} of {total}  {what}\n")


def main() -> int:
    """Runs what the command line asks for; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--log", action="store_true", help="every compile of every plan, and by how much it was mispredicted")
    options = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if options.case in name}
    results = [print_plans(name, case, has_log=options.log) for name, case in chosen.items()]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
