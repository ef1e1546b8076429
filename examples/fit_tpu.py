"""My step does not fit a TPU v5e: what fills its memory, and which policy makes it fit?

    python -m examples.fit_tpu models:gpt2_small --set batch=32

explains the peak without rematerialization, largest first, though the compiler refuses the program; then compares policies.
No TPU is needed.
"""

import argparse

import remat_kit
from remat_kit.units import format_bytes

POLICIES = ("full", "save_out_proj", "save_qkv_proj", "minimal")
LINES = 8


def main(argv: list[str] | None = None) -> None:
    """Explains, then compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="models:gpt2_small")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--target", default="v5e")
    args = parser.parse_args(argv)
    options = dict(each.split("=", 1) for each in args.set)
    explained = remat_kit.explain(args.step, policy="none", target=args.target, options=options, most_checks=0)
    fits = {True: "fits", False: "does not fit", None: "has no budget"}[explained.row.fits]
    print(f"none on {args.target} {fits}: {format_bytes(explained.memory.peak_bytes)}")
    for line in explained.memory.peak_classes[:LINES]:
        print(f"  {format_bytes(line.bytes):>10}  {line.kind}: {line.name}  {line.source}")
    compared = remat_kit.compare(args.step, policies=POLICIES, targets=[args.target], options=options)
    for row in compared.rows:
        total = "?" if row.total_bytes is None else format_bytes(row.total_bytes)
        again = "?" if row.recompute_fraction is None else f"{row.recompute_fraction:.1%}"
        print(f"{row.policy:15} {total:>10}  {again:>6} recomputed  {row.status}{'  <- best' if row.is_best else ''}")


if __name__ == "__main__":
    main()
