"""Which of the field's named policies suits my model?

    python -m examples.compare_presets models:llama3_8b --set batch=8 --target h100:8

compiles the step under each preset and prints bytes and recomputed work, least work first.
"""

import argparse

import remat_kit
from remat_kit.presets import PRESETS
from remat_kit.units import format_bytes


def main(argv: list[str] | None = None) -> None:
    """Compares all presets that keep values on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="models:gpt2_small")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--target", default="h100")
    parser.add_argument("--only", action="append", choices=sorted(PRESETS), help="default: all but those that offload")
    args = parser.parse_args(argv)
    presets = args.only or [name for name in PRESETS if not name.endswith("offloaded")]
    options = dict(each.split("=", 1) for each in args.set)
    compared = remat_kit.compare(args.step, policies=["none", *presets, "full"], targets=[args.target], options=options)
    for row in sorted(compared.rows, key=lambda row: (row.flops is None, row.flops)):
        total = row.error or format_bytes(row.total_bytes)
        again = "not available" if row.recompute_fraction is None else f"{row.recompute_fraction:.1%}"
        summary = PRESETS[row.policy].summary if row.policy in PRESETS else ""
        print(f"{row.policy:32} {total:>12} {again:>7}  {summary}{'  <- best' if row.is_best else ''}")


if __name__ == "__main__":
    main()
