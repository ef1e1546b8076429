"""Decoders small enough for CPU, and ways to ask what their training steps do: gradients, matmul FLOPs, without remat-kit."""

import functools
import math

import jax

import models
from remat_kit import _jax, parse_plan
from remat_kit.policy import bind

FAMILIES = ("gpt2_tiny", "llama3_tiny")
BATCH, SEQ = 4, 32


def make(family, plan="none", *, devices=None, **options):
    """The step of a factory under a plan, in f32 unless told otherwise."""
    factory = getattr(models, family)
    layers = options.get("layers", factory.__kwdefaults__["layers"])
    options = {"dtype": "float32", **options}
    return factory(bind(parse_plan(plan), {"layers": layers}), devices or jax.devices("cpu")[:1], **options)


@functools.cache
def first_state(family):
    """Real arguments, the same for every policy; on one device."""
    return make(family).init(jax.random.key(0))


def gradients(family, plan, **options):
    """Gradients of the loss with respect to the parameters, through the step itself: AdamW keeps 0.1 x the clipped ones."""
    step = make(family, plan, **options)
    _, optimizer_state, _ = jax.jit(step.fn)(*first_state(family))[0]
    (moments,) = [state.mu for state in jax.tree.leaves(optimizer_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(state, "mu")]
    return moments


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
