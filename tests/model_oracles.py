"""What tests of the models share: a step run from its own initial state, and the gradients of it."""

import functools

import jax
import numpy as np

from tests.decoders import QUICK, make


@functools.cache
def start(family, **options):
    """Real arguments of a step on one CPU device, the same for every policy: biases and adapters random too, images as well."""
    rng = np.random.default_rng(1)
    state, batch = make(family, **options).init(jax.random.key(0))

    def stir(path, leaf):
        is_zero = path[-1].key in ("bias", "lora_b")
        return rng.normal(0.0, 0.1, leaf.shape).astype(leaf.dtype) if is_zero else jax.tree.map(np.asarray, leaf)

    params = jax.tree_util.tree_map_with_path(stir, state.params, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return state._replace(params=params), jax.tree.map(np.asarray, batch)


@functools.cache
def run(family, plan, **options):
    """The state and metrics after one step, and the gradients: AdamW's first moments are 0.1 x the clipped ones."""
    step = make(family, plan, **options)
    state, metrics = jax.jit(step.fn, compiler_options=QUICK)(*start(family, **options))
    (adam,) = [part for part in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(part)]
    return state, metrics, adam.mu


def assert_same_gradients(family, named, **options):
    """Full and a named policy agree bitwise among themselves, and with no rematerialization but for rounding."""
    none, full, other = (run(family, plan, **options)[2] for plan in ("none", "full", named))
    largest = max(float(abs(leaf).max()) for leaf in jax.tree.leaves(none))
    assert largest > 0
    assert jax.tree.structure(none) == jax.tree.structure(full) == jax.tree.structure(other)
    for a, b, c in zip(*map(jax.tree.leaves, (none, full, other)), strict=True):
        assert float(abs(a - b).max()) <= 2e-6 * largest
        assert float(abs(a - c).max()) <= 2e-6 * largest


def kept_names(step):
    """The names of what a step keeps for its backward pass, stacked over all its layers."""
    from remat_kit.trace import residuals

    return {name for kept in residuals(step.fn, *step.args) if kept.num_layers for name in kept.names}


def _is_adam(part):
    return hasattr(part, "mu")
