"""A training loop that imports a policy or a plan: `python -m train --model gpt2_small --policy "save(q,k,v)"`.

It trains any step of the contract (`remat_kit.Step`) that takes a state and a batch, and everything it knows about the model it
asks of that step: the same object that remat-kit compiles for a target. Data come in through `train.data`, checkpoints leave
through `train.checkpoints`, `train.launch` starts and supervises several processes. See docs/train.md.
"""
