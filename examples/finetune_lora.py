"""How do I fine-tune with adapters on a frozen model, in bf16 or 4 bits?

    python -m examples.finetune_lora --frozen nf4

takes the tiny Llama of `models/` as it comes (load yours into `state.params`), trains low-rank adapters on one sentence, and
prints what trains, what is frozen, and the loss. The same step under the compiler:
`remat-kit compare models:llama3_8b_qlora --target h100 --policy full`.
"""

import argparse

import jax
import jax.numpy as jnp

import models
import remat_kit
from models.adapters import FACTORS
from models.training import split
from remat_kit.plans import bind
from remat_kit.units import format_bytes

TEXT = b"Memory is what the backward pass remembers of the forward one. "


def main(argv: list[str] | None = None) -> None:
    """Fine-tunes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frozen", default="bf16", help="bf16, int4 or nf4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)
    policies = bind(remat_kit.parse_plan("full"), {"layers": 2})
    options = {"batch": 4, "seq": len(TEXT) - 1, "learning_rate": 1e-2}
    step = models.llama3_tiny(policies, jax.devices()[:1], lora_rank=args.rank, frozen=args.frozen, **options)
    state = step.make_state(jax.random.key(0))
    trained, frozen = split(state.params, lambda names: names[-1] in FACTORS)
    for what, tree in (("trains", trained), ("frozen", frozen), ("optimizer state", state.opt_state)):
        print(f"{what:16} {format_bytes(sum(leaf.nbytes for leaf in jax.tree.leaves(tree))):>10}")

    tokens = jnp.tile(jnp.frombuffer(TEXT, jnp.uint8).astype(jnp.int32), (options["batch"], 1))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": jnp.ones(tokens[:, 1:].shape)}
    run = jax.jit(step.fn, donate_argnums=step.donate)
    for number in range(args.steps + 1):
        state, metrics = run(state, batch)
        if number % 10 == 0:
            print(f"step {number:3}  loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
