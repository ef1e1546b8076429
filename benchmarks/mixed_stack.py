"""Mixed stacks: memory against the straight line between plain scans, and time against a plain scan that keeps the same.

    python -m benchmarks.mixed_stack memory --model mlp --target h100 --target v5p
    python -m benchmarks.mixed_stack memory --model llama --target h100:8
    python -m benchmarks.mixed_stack time

`memory` compiles, for each target, k of the 16 layers under the saving policy and the rest under `full`, for k = 0, 4, 8, 12, 16
(the ends are plain scans), and prints the compiler's total, how far it lies above the line in percent of the distance between the
ends, and the compile time. On more than one device the step is FSDP. `time` runs pairs of steps on this machine, one after the
other: a stack in two segments whose policies keep the same, and a plain scan under that policy.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from remat_kit.compile.environment import prepare_environment

prepare_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.ad_checkpoint import checkpoint_name  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import remat_kit  # noqa: E402
from remat_kit.plans import Policies  # noqa: E402

NUM_LAYERS, WIDTH, HIDDEN, TOKENS = 16, 2048, 8192, 16384
SAVING = {"mlp": "save(h)", "llama": "save(q,k,v,attn,attn_out,gate,up)"}
STEPS = {"mlp": "benchmarks.mixed_stack:mlp_step", "llama": "models:llama3_8b"}
OPTIONS = {"mlp": {}, "llama": {"layers": NUM_LAYERS, "batch": 8, "seq": 2048}}


def mlp_block(params: Any, x_TD: jax.Array) -> jax.Array:
    """A residual MLP; its hidden values before the activation are named `h`."""
    h_TF = checkpoint_name(x_TD @ params["up"], "h")
    return x_TD + jax.nn.gelu(h_TF) @ params["down"]


def mlp_step(
    policies: Policies, devices: Sequence[Any], *, layers: int = NUM_LAYERS, tokens: int = TOKENS, width: int = WIDTH
) -> remat_kit.Step:
    """A step of gradient descent on the MLP stack of docs/design: f32, four times as wide inside; FSDP on several devices."""
    mesh = Mesh(np.array(devices), ("fsdp",))

    def abstract(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    params = {
        "up": abstract((layers, width, 4 * width), None, "fsdp"),
        "down": abstract((layers, 4 * width, width), None, None, "fsdp"),
    }

    def step(params: Any, x_TD: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(_loss)(params, x_TD, policies["layers"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return remat_kit.Step(
        fn=step,
        args=(params, abstract((tokens, width), "fsdp")),
        donate=(0,),
        roles=("parameters", "batch"),
        stacks=(remat_kit.Stack(name="layers", num_layers=layers, accepts_mixed=True),),
        knobs=remat_kit.Knobs(batch="tokens", depth="layers"),
    )


def _loss(params: Any, x_TD: jax.Array, plan: Any) -> jax.Array:
    return (remat_kit.stack(mlp_block, params, x_TD, plan) ** 2).mean()


def print_memory(model: str, targets: Sequence[str]) -> bool:
    """Prints the table; says whether every point keeps the bounds: 3 % above the line, and monotone."""
    saving, counts = SAVING[model], (0, 4, 8, 12, NUM_LAYERS)
    plans = ["full", *(f"full*{NUM_LAYERS - count} | {saving}*{count}" for count in counts[1:-1]), saving]
    comparison = remat_kit.compare(STEPS[model], policies=plans, targets=targets, options=OPTIONS[model])
    is_good = True
    for target in targets:
        rows = [row for row in comparison.rows if row.target == target]
        totals = [row.total_bytes for row in rows if row.total_bytes is not None]
        if len(totals) < len(rows):
            _say(f"{target}: {next(row.error for row in rows if row.total_bytes is None)}")
            return False
        first, last = totals[0], totals[-1]
        for count, total, row in zip(counts, totals, rows, strict=True):
            above = (total - first) / (last - first) - count / NUM_LAYERS
            is_good &= above <= 0.03
            _say(
                f"{target:12} {count:3} saved {total / 2**30:8.3f} GiB  {above:+7.1%} of the line, compile {row.compile_s:5.1f} s"
            )
        is_good &= totals == sorted(totals)
    return is_good


def print_time(num_pairs: int) -> bool:
    """Prints the ratio of step times; says whether the lower end of its 95 % interval is at most 1.02."""
    plain = _ready("save(h)")
    ours = _ready("save(h)*4 | save(h)+save(no_such_name)*4")
    ratios = []
    for number in range(num_pairs):
        first, second = (plain, ours) if number % 2 else (ours, plain)
        seconds = {run: _seconds(run) for run in (first, second)}
        ratios.append(seconds[ours] / seconds[plain])
    low, high = _interval(ratios)
    _say(f"{num_pairs} pairs: median ratio {statistics.median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}")
    return low <= 1.02


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _ready(plan: str) -> Callable[[], Any]:
    layers, width, tokens = 8, 256, 512
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (layers, width, 4 * width)) / width**0.5,
        "down": jax.random.normal(keys[1], (layers, 4 * width, width)) / (4 * width) ** 0.5,
    }
    x_TD = jax.random.normal(keys[2], (tokens, width))
    compiled = jax.jit(jax.value_and_grad(lambda params, x_TD: _loss(params, x_TD, plan))).lower(params, x_TD).compile()
    jax.block_until_ready(compiled(params, x_TD))
    return lambda: jax.block_until_ready(compiled(params, x_TD))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _interval(ratios: Sequence[float], num_resamples: int = 2000) -> tuple[float, float]:
    """A bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(num_resamples))
    return medians[int(0.025 * num_resamples)], medians[int(0.975 * num_resamples)]


def main() -> int:
    """Runs what the command line asks for; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    memory = commands.add_parser("memory")
    memory.add_argument("--model", choices=tuple(STEPS), default="mlp")
    memory.add_argument("--target", action="append", required=True)
    commands.add_parser("time").add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    is_good = print_time(options.pairs) if options.command == "time" else print_memory(options.model, options.target)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
