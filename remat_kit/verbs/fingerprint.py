"""A fingerprint of a training step that does not change with its policy, with JAX's version, or from process to process.

In: a step, built under any policy, and its trace. Out: 16 hexadecimal digits of a hash over what a plan depends on: the shapes
and dtypes of the step's arguments, its stacks, its devices, and the named values.
"""

import hashlib

import jax
import msgspec

from remat_kit.graph import StepGraph
from remat_kit.step import Step

NUM_DIGITS = 16


def fingerprint_of(step: Step, graph: StepGraph) -> str:
    """Fingerprint of a step.

    Args:
        step: The step, under any policy.
        graph: Its trace.
    """
    named = {
        (op.name, graph.values[op.outputs[0]].shape, graph.values[op.outputs[0]].dtype)
        for op in graph.ops
        if op.kind == "name" and op.name is not None
    }
    facts = {
        "arguments": [(list(leaf.shape), str(leaf.dtype)) for leaf in jax.tree.leaves(step.args)],
        "stacks": [(stack.name, stack.num_layers) for stack in step.stacks],
        "devices": graph.num_devices,
        "names": sorted(map(repr, named)),
    }
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:NUM_DIGITS]
