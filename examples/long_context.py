"""How long a context fits, and under which plan?

    python -m examples.long_context models:llama3_8b --target h100:8 --set batch=8

doubles and bisects the sequence under the leanest plan, compiling each, and then plans at the longest one that fits.
"""

import argparse

import remat_kit
from remat_kit.units import format_bytes


def main(argv: list[str] | None = None) -> None:
    """Finds the longest sequence and its plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="models:llama3_8b")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--budget", help="default: what JAX reserves of the memory")
    args = parser.parse_args(argv)
    options = dict(each.split("=", 1) for each in args.set)
    settings = remat_kit.PlanSettings(budget=args.budget, options=options)
    found = remat_kit.plan_largest(args.step, target=args.target, knob="seq", settings=settings)
    if found.plan is None:
        print("no sequence fits")
        return
    print(f"{found.value} tokens fit: {format_bytes(found.total_bytes)} at the least")
    if found.next_value is not None and found.next_total_bytes is not None:
        print(f"{found.next_value} tokens do not: {format_bytes(found.next_total_bytes)}")
    print(found.plan.result.sentence)


if __name__ == "__main__":
    main()
