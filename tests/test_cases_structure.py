"""Faults that people reported of where rematerialization stands, each with the value that shows its absence.

One test for each row of the kinds placement, stack, Flax, kernel and random numbers, named for the fault; the docstring has the
report. The others are in `test_cases_policy.py`, and what only a compiler shows in `test_cases_compiled.py`.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from apply_oracles import (
    assert_close,
    assert_equal,
    count,
    num_barriers,
    num_regions,
)
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit import PolicyError, RematWarning, remat, residual_report, stack
from remat_kit.graph import Origin
from remat_kit.verbs.parity import check_parity
from tests.cases import KEYS, PARAMS, B, D, F, L, X, block, loss, unrolled

# Placement


def test_an_outer_region_takes_the_inner_ones_residuals_into_its_recomputation():
    """jax-ml/jax#18817: they vanish from the list; the report has both levels."""
    inner = remat(lambda x: jnp.sin(jnp.sin(x)), "full")
    four = lambda x: inner(inner(inner(inner(x))))  # noqa: E731
    across = lambda report: [each.origin for each in report.residuals]  # noqa: E731
    assert across(residual_report(four, X)) == [Origin.OPERATION] * 3 + [Origin.ARGUMENT]
    report = residual_report(remat(four, "full"), X)
    assert across(report) == [Origin.ARGUMENT]
    assert sum(each.region == 0 for each in report.during_recompute) == 3


@pytest.mark.parametrize(
    ("options", "num_layers", "has_barrier"),
    [({}, L, False), ({"unroll": L}, L, True), ({"unroll": 4}, L, True), ({}, 1, True)],
    ids=["scan", "unrolled whole", "unrolled in part", "one layer"],
)
def test_the_barrier_follows_from_the_structure(options, num_layers, has_barrier):
    """jax-ml/jax#24062, jax#6639, flax#1499: without it, unrolled layers are merged with the forward pass."""
    params = jax.tree.map(lambda leaf: leaf[:num_layers], PARAMS)
    assert (num_barriers(jax.grad(lambda params: loss("full", params, **options)), params) > 0) == has_barrier
    assert num_barriers(jax.grad(lambda params: unrolled("full", params, X)), PARAMS) >= L


def test_a_policy_around_the_loop_a_policy_in_its_body_and_both():
    """apple/axlearn#1171: the scan helper ignored the policy. A stack is scan(remat(f)): one region, in the loop's body."""

    def loop(run):
        return lambda params: (jax.lax.scan(lambda x, p: (run(p, x), None), X, params)[0] ** 2).sum()

    body = remat(block, "save(h)", prevent_cse=False)
    forms = (loop(body), remat(loop(block), "save(h)"), remat(loop(body), "save(h)"))
    with pytest.warns(RematWarning, match="whole loss"):
        reports = [residual_report(form, PARAMS) for form in forms]
    stacks = [{name for each in report.residuals if each.num_layers == L for name in each.names} for report in reports]
    again = [sum(each.calls for each in report.recomputed if each.kind == "dot_general") for report in reports]
    assert stacks == [{"in", "h"}, {"h"}, {"h"}]
    assert again[0] == 0 and again[1] >= L and again[2] >= L
    ours = residual_report(lambda params: loss("save(h)", params), PARAMS)
    assert {name for each in ours.residuals if each.num_layers == L for name in each.names} == {"in", "h"}
    assert [each for each in ours.recomputed if each.kind == "dot_general"] == []


# Stacks


@pytest.mark.parametrize(
    ("group", "carries", "again"), [(None, L, 0), (2, 6, 6 * 1), (4, 3, 3 * 3), (5, 2 + 1, 2 * 4 + 1), ("sqrt", 4, 4 * 2)]
)
def test_the_block_size_of_checkpointing_counts(group, carries, again):
    """levanter#446, #427: the option did nothing. Groups of k keep L/k carries, and run their other layers again."""
    report = residual_report(lambda params: loss("full", params, group=group), PARAMS)
    kept = sum(each.num_bytes for each in report.residuals if each.origin is Origin.OPERATION and each.shape[-2:] == (B, D))
    final = B * D * 4 * (group is not None or True)
    assert (kept - final) // (B * D * 4) in (carries, carries - 1)  # the first carry is the argument x
    run = lambda **options: num_loop_matmuls(lambda params: loss("full", params, **options))  # noqa: E731
    assert run(group=group) - run() == 2 * again


def num_loop_matmuls(fn):
    """Matmuls of the gradient, loop lengths multiplied."""

    def walk(program, times):
        for equation in getattr(program, "jaxpr", program).eqns:
            yield times * (equation.primitive.name == "dot_general")
            for value in equation.params.values():
                for inner in value if isinstance(value, tuple) else (value,):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        yield from walk(inner, times * equation.params.get("length", 1))

    return sum(walk(jax.make_jaxpr(jax.grad(fn))(PARAMS), 1))


@pytest.mark.parametrize(
    ("plan", "options"), [("full", {"group": 1}), ("full", {"group": 13}), ("none", {"group": 4}), ("save(h)", {"group": "sqrt"})]
)
def test_an_option_that_would_do_nothing_raises(plan, options):
    """levanter#446: every accepted option changes the program."""
    with pytest.raises(PolicyError, match="group="):
        loss(plan, **options)


# Flax


class Blk(nn.Module):
    @nn.compact
    def __call__(self, x, *, train: bool = False):
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(F)(x))
        assert isinstance(train, bool), "a flag stays a Python value"
        return x + nn.Dense(D)(jnp.tanh(y))


class NnxBlk(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x, *, double: bool):
        y = x + self.down(jnp.tanh(self.up(x)))
        return y * 2 if double else y


def test_wrapping_one_nnx_module_leaves_the_second_as_it_was():
    """google/flax#4626: a model built with nnx.remat spoiled a second one of the same class."""
    first, second = NnxBlk(nnx.Rngs(0)), NnxBlk(nnx.Rngs(0))
    attributes, before = dict(vars(NnxBlk)), second(X, double=False)
    wrapped = remat(first, "full")
    wrapped(X, double=False)
    assert_equal(second(X, double=False), before)
    assert dict(vars(NnxBlk)) == attributes
    regions = [num_regions(lambda x, module=module: module(x, double=False), X) for module in (wrapped, first, second)]
    assert regions == [1, 0, 0]


def test_keyword_only_flags_stay_python_values():
    """google/flax#1455: nn.remat(BatchNorm)() took no keyword; nnx.remat of a method with a keyword-only one raises TypeError."""
    module = NnxBlk(nnx.Rngs(0))
    assert_close(remat(module, "full")(X, double=True), module(X, double=True))
    norm = remat(nn.BatchNorm, "full")()
    variables = norm.init(KEYS[0], X, use_running_average=False)
    assert_equal(norm.apply(variables, X, use_running_average=True), nn.BatchNorm(use_running_average=True).apply(variables, X))
    model = remat(Blk, "full")()
    model.apply(model.init(KEYS[0], X), X, train=True, mutable=["batch_stats"])


def test_the_parameter_tree_is_that_without_remat_and_that_of_a_loop_stacked():
    """AI-Hypercomputer/maxtext#4504: Blk_0 became CheckpointBlk_0, and a checkpoint could not be restored."""

    class Net(nn.Module):
        block: type[nn.Module]

        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = self.block()(x)
            return x

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(D)(jnp.tanh(nn.Dense(F)(x)))

    on, off = Net(remat(Plain, "full")), Net(Plain)
    params = off.init(KEYS[0], X)
    assert_equal(on.init(KEYS[0], X), params)
    assert_equal(on.apply(params, X), off.apply(params, X))
    # From a loop to a scan and back: the trees of the layers, stacked in order.
    layers = [params["params"][f"Plain_{index}"] for index in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    run = functools.partial(stack, lambda layer, x: Plain().apply({"params": layer}, x), x=X)
    for plan in ("full", "full*1 | none*2"):
        assert_close(run(stacked, plan=plan), off.apply(params, X))
    assert_equal([jax.tree.map(lambda leaf, index=index: leaf[index], stacked) for index in range(3)], layers)


# Kernels


def test_a_kernel_runs_once_when_all_that_its_derivative_needs_is_kept():
    """jax-ml/jax#26374, maxtext#1805: naming the output outside ran cuDNN attention again."""
    pytest.importorskip("nvidia.cudnn", reason="needs remat-kit[gpu-cudnn]")
    qkv = [jax.random.normal(key, (2, 128, 4, 64), jnp.bfloat16) for key in KEYS]

    def calls(policy, attend):
        run = remat(lambda *qkv: jnp.sin(checkpoint_name(attend(*qkv), "o")), policy)
        return count(
            jax.grad(lambda *qkv: run(*qkv).astype(jnp.float32).sum(), (0, 1, 2)), *qkv, of=("dot_product_attention_fwd_wrapper",)
        )

    plain = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=True)
    assert {policy: calls(policy, plain) for policy in ("none", "full", "save(o)", "kernels")} == {
        "none": 1,
        "full": 2,
        "save(o)": 2,
        "kernels": 1,
    }


# Random numbers and rounding


def test_bfloat16_gradients_are_held_to_its_precision_and_float32_ones_to_theirs():
    """jax-ml/jax#8702: they are not bitwise equal; the bound is by dtype."""

    def build(policy):
        run = remat(lambda x: jax.nn.softmax((x + 1).astype(jnp.float32), axis=-1).astype(x.dtype), policy)
        return lambda x: (run(x).astype(jnp.float32) ** 2).sum()

    x = jax.random.normal(KEYS[0], (32, 32))
    for dtype, bound in ((jnp.bfloat16, 1e-2), (jnp.float32, 2e-6)):
        (row,) = check_parity(build, x.astype(dtype), policies=("none", "full")).rows
        assert row.agrees and row.bound == bound


def test_evaluation_has_no_barrier_and_no_more_memory():
    """jax-ml/jax#6098, #7100: evaluation paid for barriers of a gradient that nobody took."""
    run = lambda policy: lambda params: unrolled(policy, params, X)  # noqa: E731
    assert num_barriers(run("full"), PARAMS) == 0
    assert num_barriers(jax.grad(run("full")), PARAMS) >= L
    temps = [jax.jit(run(policy)).lower(PARAMS).compile().memory_analysis().temp_size_in_bytes for policy in ("full", "none")]
    assert temps[0] == temps[1]
