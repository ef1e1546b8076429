"""What is the fastest way to train on a GPU with 24 GB?

    python -m examples.plan_for_24gb models:gpt2_medium --set batch=16

asks for the plan that costs least and fits an RTX 3090, compiled by its compiler on a machine without one, and writes `plan.toml`
for the training loop: `python -m train --model gpt2_medium --batch 16 --plan plan.toml`.
"""

import argparse
import sys
from pathlib import Path

import remat_kit
from remat_kit.plan_file import write_plan
from remat_kit.units import format_bytes


def main(argv: list[str] | None = None) -> int:
    """Plans, prints, writes the file; 3 when nothing fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="models:gpt2_medium")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--target", default="rtx3090")
    parser.add_argument("--budget", help="default: what JAX reserves of the memory")
    parser.add_argument("--out", type=Path, default=Path("plan.toml"))
    args = parser.parse_args(argv)
    options = dict(each.split("=", 1) for each in args.set)
    found = remat_kit.plan(args.step, target=args.target, budget=args.budget, options=options)
    result = found.result
    print(result.sentence)
    for decision in result.decisions:
        print(f"  {decision.name:12} {decision.action}, in {decision.num_kept} of {decision.num_layers} layers")
    print(f"compiled: {format_bytes(result.compiled_total_bytes)} of {format_bytes(result.budget_bytes)}")
    if not result.fits:
        for way in result.ways_out:
            print(f"instead: {way.text}")
        return 3
    write_plan(found, args.out)
    print(f"python -m train --plan {args.out} takes it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
