"""The table of policies: (policy, what is saved, matmuls that run again) x (way to apply it) x jax_remat3 off and on.

One block of five matmuls in every form. A row is written by hand: the values that cross from the forward to the backward pass of
a layer, known by their shapes, and the matmuls of the layer that run again; or the error. Both are read off the traced gradient.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from apply_oracles import assert_close, assert_equal
from jax.ad_checkpoint import checkpoint_name
from policy_forms import COLUMNS, KEY, PARAMS, B, E, F, H, L, X, block, in_stack, one_layer

from remat_kit import PolicyError, remat
from tests.decoders import QUICK

SHAPES = {"up": (B, F), "expert": (E, B, H), "scores": (E, B, B), "context": (B, H)}
NAMES = " ".join(SHAPES)
IS_OLD = jax.__version_info__ < (0, 12)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy and what it does to one layer.

    Attributes:
        policy: Its text.
        saved: What is kept, by name.
        again: Matmuls that run again. The last one, `down`, is never needed; `none` runs none again, `full` four.
        on_host: Whether some of it is kept in host memory.
        error: With jax_remat3 on, what the error says; None = the same as without.
        error_before_012: The same, where jax 0.12 can do it.
    """

    policy: str
    saved: str = ""
    again: int
    on_host: bool = False
    error: str | None = None
    error_before_012: str | None = None

    def __str__(self) -> str:
        return self.policy


BY_OPERATION = "it is not asked about operations, only about names"
NO_OFFLOAD = "ignores offloading"

# fmt: off
TABLE = [
    Row(policy="none",                       saved=NAMES,                   again=0),
    Row(policy="full",                                                      again=4),
    Row(policy="save(up)",                   saved="up",                    again=3),
    Row(policy="save(expert)",               saved="expert",                again=3),
    Row(policy="save(up,scores)",            saved="up scores",             again=2),
    Row(policy="save(*)",                    saved=NAMES,                   again=0),
    Row(policy="save(*)+recompute(scores)",  saved="up expert context",     again=1),
    Row(policy="save(u*)+recompute(up)",                                    again=4),
    Row(policy="weights",                    saved="up expert",             again=2),
    Row(policy="weights+save(context)",      saved="up expert context",     again=1),
    Row(policy="save(*)+recompute(context)+weights", saved="up expert scores", again=1),
    Row(policy="offload(up,context)",        saved="up context",            again=2, on_host=True, error_before_012=NO_OFFLOAD),
    Row(policy="save(up)+offload(context)",  saved="up context",            again=2, on_host=True, error_before_012=NO_OFFLOAD),
    Row(policy="dots",                       saved=NAMES,                   again=0, error=BY_OPERATION),
    Row(policy="dots_no_batch",              saved="up context",            again=2, error=BY_OPERATION),
    Row(policy="dots+recompute(up)",         saved=NAMES,                   again=0, error=BY_OPERATION),
    Row(policy="dots+cheap(1000)",                                          again=4, error=BY_OPERATION),
    Row(policy="save(scores)+dots_no_batch", saved="up scores context",     again=1, error=BY_OPERATION),
    Row(policy="kernels",                                                   again=4, error=BY_OPERATION),
    Row(policy="smaller(200)",               saved="up context",            again=2, error=BY_OPERATION),
]
# fmt: on


def loss(column, policy):
    run = column.apply(policy)

    def value(params, x):
        y, num_kept = run(params, x, KEY)
        return jnp.square(y).sum(), num_kept

    return value


def gradient(column, policy):
    return jax.grad(loss(column, policy), argnums=(0, 1), has_aux=True)


def num_matmuls(program, times=1):
    """Matmuls of a program, times the lengths of the loops around them."""
    total = 0
    for equation in getattr(program, "jaxpr", program).eqns:
        total += times * (equation.primitive.name == "dot_general")
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    total += num_matmuls(inner, times * equation.params.get("length", 1))
    return total


def trace(column, policy):
    """Names of what `jax.vjp` holds on to, told by shape, and the program of the gradient."""

    def run(params, x):
        _, pull, _ = jax.vjp(loss(column, policy), params, x, has_aux=True)
        return pull, pull(1.0)

    program, (kept, _) = jax.make_jaxpr(run, return_shape=True)(PARAMS, X)
    length = column.lengths(policy)
    shapes = {leaf.shape for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.float32}
    return {name for name, shape in SHAPES.items() if ((length, *shape) if length else shape) in shapes}, program


@functools.cache
def num_matmuls_without_remat(column, is_on):
    with remat3(is_on):
        return num_matmuls(trace(column, "none")[1])


@contextlib.contextmanager
def remat3(is_on):
    jax.config.update("jax_remat3", is_on)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", False)


def expected_error(row, is_on):
    return (row.error or (row.error_before_012 if IS_OLD else None)) if is_on else None


@pytest.mark.parametrize("is_on", [False, True], ids=["classic", "remat3"])
@pytest.mark.parametrize("column", COLUMNS, ids=str)
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_what_is_saved_and_what_runs_again(row, column, is_on):
    with remat3(is_on):
        if error := expected_error(row, is_on):
            with pytest.raises(PolicyError, match=f"can't be expressed with jax_remat3: .*{error}"):
                trace(column, row.policy)
            return
        saved, program = trace(column, row.policy)
    assert saved == set(row.saved.split())
    num_again = num_matmuls(program) - num_matmuls_without_remat(column, is_on)
    assert num_again == column.num_again(row) - column.num_again(TABLE[0])
    assert ("<host>" in str(program)) == row.on_host


@pytest.fixture(scope="module")
def results():
    """Gradients and masks of a cell, as compiled, once for each."""
    cache = {}

    def get(column, policy, is_on):
        key = (column.name, policy, is_on)
        if key not in cache:
            with remat3(is_on):
                cache[key] = jax.jit(gradient(column, policy), compiler_options=QUICK)(PARAMS, X)
        return cache[key]

    return get


COMPILED = ["save(up,scores)", "weights+save(context)", "offload(up,context)"]


ELSEWHERE = ("segmented stack", "mixed linen stack", "mixed nnx stack")  # in tests of their own too: test_stack*.py
COMPILED_COLUMNS = [
    pytest.param(column, marks=[pytest.mark.slow] if column.name in ELSEWHERE else [], id=column.name) for column in COLUMNS
]


@pytest.mark.parametrize("is_on", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["classic", "remat3"])
@pytest.mark.parametrize("column", COMPILED_COLUMNS)
def test_gradients_and_masks(column, is_on, results):
    plain, num_kept = results(column, "none", False)
    full, full_num_kept = results(column, "full", is_on)
    assert_close(full, plain)
    assert_equal(full_num_kept, num_kept)  # each place that is kept is counted with a number of its own
    for row in TABLE:
        if row.policy in COMPILED and expected_error(row, is_on) is None:
            found, found_num_kept = results(column, row.policy, is_on)
            assert_close(found, plain)
            assert_equal(found_num_kept, num_kept)
            if not is_on:  # the barriers of jax_remat3 differ with what is saved
                assert_equal(found, full)


def test_masks_differ_by_layer_and_key():
    kept = [in_stack("full")("")(PARAMS, X, jax.random.key(seed))[1] for seed in (7, 8)]
    assert len({int(count) for count in [*kept[0], *kept[1]]}) == 2 * L


VMAPPED = [("full", 4), ("save(up,scores)", 2), ("weights", 2), ("dots", 0), ("dots_no_batch", 4)]


@pytest.mark.parametrize("is_on", [False, True], ids=["classic", "remat3"])
@pytest.mark.parametrize(("policy", "again"), VMAPPED)
def test_under_vmap(policy, again, is_on):
    """By batch dimensions nothing is kept there: all matmuls of a block that is vmapped with its weights have them."""
    (row,) = (row for row in TABLE if row.policy == policy)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), PARAMS)
    xs = jnp.stack([X, X])

    def vmapped(policy):
        run = remat(jax.vmap(lambda params, x: block(params, x, key=KEY)[0]), policy, params_argnums=0)
        return jax.grad(lambda params: jnp.square(run(jax.vmap(one_layer)(params), xs)).sum())

    plain = num_matmuls(jax.make_jaxpr(vmapped("none"))(params))
    with remat3(is_on):
        error: Any = PolicyError if expected_error(row, is_on) else None
        if is_on and IS_OLD:
            error = NotImplementedError  # by JAX, for every name under vmap
        if error:
            with pytest.raises(error):
                jax.make_jaxpr(vmapped(policy))(params)
        else:
            assert num_matmuls(jax.make_jaxpr(vmapped(policy))(params)) - plain == again


@pytest.mark.parametrize("is_on", [False, True], ids=["classic", "remat3"])
def test_names_inside_a_custom_vjp(is_on):
    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x)

    def forward(x):
        out = checkpoint_name(jnp.sin(x @ PARAMS["up"][0]) @ PARAMS["up"][0].T, "inside")
        return out, out

    kernel.defvjp(forward, lambda out, gradient: (gradient * out,))

    def grad(policy):
        return jax.grad(lambda x: remat(lambda x: kernel(jnp.sin(x)), policy)(x).sum())

    full, plain = (num_matmuls(jax.make_jaxpr(grad(policy))(X)) for policy in ("full", "none"))
    assert full == plain + 2
    with remat3(is_on):
        if is_on:
            with pytest.raises(PolicyError, match="names inside a custom_vjp are lost"):
                jax.make_jaxpr(grad("save(inside)"))(X)
        else:
            assert num_matmuls(jax.make_jaxpr(grad("save(inside)"))(X)) == plain
