"""Decoders small enough for CPU, and ways to ask what their training steps do: gradients, matmul FLOPs, without remat-kit."""

import functools
import math

import jax
import numpy as np

import models
from remat_kit import _jax, parse_plan
from remat_kit.plans import bind

FAMILIES = ("gpt2_tiny", "llama3_tiny")
BATCH, SEQ = 4, 32


def make(family, plan="none", *, devices=None, **options):
    """The step of a factory under a plan, in f32 unless told otherwise."""
    factory = getattr(models, family)
    layers = options.get("layers", factory.__kwdefaults__["layers"])
    options = {"dtype": "float32", **options}
    return factory(bind(parse_plan(plan), {"layers": layers}), devices or jax.devices("cpu")[:1], **options)


QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options that halve the time to compile for CPU; XLA's own passes are the same."""


@functools.cache
def first_state(family):
    """Real arguments of a step on one device, the same for every policy: every parameter random, norms and biases too."""
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        if path[0].idx == 1:  # the batch
            return rng.integers(0, 256, leaf.shape, leaf.dtype) if leaf.dtype == "int32" else np.ones(leaf.shape, leaf.dtype)
        is_parameter = path[1].name == "params"
        return rng.normal(0.0, 0.1, leaf.shape).astype(leaf.dtype) if is_parameter else np.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, make(family).args)


def run(step, family):
    """The step's results on `first_state`."""
    return jax.jit(step.fn, compiler_options=QUICK)(*first_state(family))


def gradients(family, plan, **options):
    """Gradients of the loss by the parameters, out of the step itself: AdamW's first moments are 0.1 x the clipped ones."""
    (state, _) = run(make(family, plan, **options), family)
    (adam,) = [part for part in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(part)]
    return adam.mu


def _is_adam(part):
    return hasattr(part, "mu")


def largest(tree):
    """The largest absolute entry."""
    return max(float(abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def step_flops(step):
    """FLOPs of all matmuls of a step, loops included, counted in its jaxpr."""
    return _flops(jax.jit(step.fn).trace(*step.args).jaxpr)


def _flops(program):
    total = 0
    for eqn in _jax.open_jaxpr(program)[0].eqns:
        if eqn.primitive.name == "dot_general":
            left = eqn.invars[0].aval.shape
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(_flops(inner) for inner in _jax.inner_programs(eqn))
    return total


def count_primitive(program, name):
    """How often a primitive stands in a jaxpr, loops counted once."""
    eqns = _jax.open_jaxpr(program)[0].eqns
    return sum((eqn.primitive.name == name) + sum(count_primitive(p, name) for p in _jax.inner_programs(eqn)) for eqn in eqns)
