"""Inputs that a first user and an attacker thought of: what they do, or the message that they get."""

import dataclasses
import importlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from remat_kit import ApplyError, PolicyError, Stack, StepError, check_parity, parse_plan, remat, residuals, stack
from remat_kit.errors import BudgetError, FactoryError, IdleRuleWarning
from remat_kit.graph import ResidualReport
from remat_kit.plans import NO_REMAT
from remat_kit.report.residuals import write_residuals
from remat_kit.units import parse_bytes
from remat_kit.verbs.build import build, read_options
from remat_kit.verbs.question import load_factory, spell_factory

LAYERS = jnp.stack([jnp.eye(3)] * 3)
X = jnp.ones((2, 3))


def layer(w, x):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("plan", ["full", "full*1 | none"])
def test_stacks_take_keys_numpy_and_scalars(plan):
    expected = stack(layer, LAYERS, X, "none")
    keyed = stack(lambda w, x, key: layer(w, x) + 0 * jax.random.uniform(key), LAYERS, X, plan, key=jax.random.key(0))
    np.testing.assert_allclose(keyed, expected, rtol=1e-6)
    np.testing.assert_allclose(stack(layer, np.asarray(LAYERS), np.asarray(X), plan), expected, rtol=1e-6)
    carry, counts = stack(lambda w, x: (layer(w, x), 3), LAYERS, X, plan)
    np.testing.assert_allclose(carry, expected, rtol=1e-6)
    assert counts.tolist() == [3, 3, 3]


def test_unroll_is_at_least_one():
    with pytest.raises(StepError, match="unroll=0"):
        stack(layer, LAYERS, X, "full", unroll=0)


def test_python_values_that_are_equal_but_not_the_same():
    divided = remat(lambda x, n: x / n, "full")
    assert float(divided(jnp.float32(1), 0.0)) == -float(divided(jnp.float32(1), -0.0)) == np.inf
    scaled = remat(lambda x, n: x * n[0], "full", static_argnums=1)
    assert scaled(jnp.int32(1), (2,)).dtype == jnp.int32
    assert scaled(jnp.int32(1), (2.0,)).dtype == jnp.float32


@pytest.mark.parametrize("policy", [None, b"full", jax.checkpoint_policies.dots_saveable])
def test_what_is_no_policy(policy):
    with pytest.raises(PolicyError, match="is no policy"):
        remat(layer, policy)


@pytest.mark.parametrize("plan", [None, ["full"] * 3])
def test_what_is_no_plan(plan):
    with pytest.raises(PolicyError, match="is no plan: give a text"):
        stack(layer, LAYERS, X, plan)


@pytest.mark.parametrize("plan", ["full", "full*1 | none"])
def test_outputs_of_layers_are_arrays(plan):
    with pytest.raises(StepError, match="the block returns 'text', which is no array"):
        stack(lambda w, x: (layer(w, x), "text"), LAYERS, X, plan)


def test_parity_sees_imaginary_parts():
    def loss(policy):
        return lambda x: (x * (1 + 2j if policy == "full" else 1 + 1j)).real.sum()

    report = check_parity(loss, jnp.ones(3, "complex64"), policies=("none", "full"))
    assert not report.agrees


@pytest.mark.parametrize("apply", [remat, lambda fn, policy: stack(fn, LAYERS, X, policy)])
def test_a_rule_that_a_later_one_overrules_warns(apply):
    with pytest.warns(IdleRuleWarning, match=r"smaller\(1KiB\) in .* has no effect, as smaller\(2KiB\) comes later"):
        apply(layer, "smaller(1KiB)+dots+smaller(2KiB)")


def test_positions_of_arguments_are_numbers():
    assert float(remat(lambda x, n: x * n, "full", static_argnums=np.int64(1))(jnp.float32(2), 3)) == 6
    for option in ("static_argnums", "params_argnums"):
        for given in ("x", None, 1.0):
            with pytest.raises(ApplyError, match=f"{option}=.*give positions of arguments"):
                remat(layer, "full", **{option: given})


def test_what_can_not_be_wrapped():
    with pytest.raises(ApplyError, match="can't be rematerialized"):
        remat(3, "full")
    with pytest.raises(ApplyError, match="params_argnums"):
        remat(layer, "weights", params_argnums=5)(LAYERS[0], X)


@pytest.mark.parametrize(
    "text", ['save("a\\x")', "full*" + "9" * 5000, "cheap(" + "9" * 5000 + ")", "smaller(" + "9" * 400 + ")"]
)
def test_texts_that_break_readers(text):
    with pytest.raises(PolicyError):
        parse_plan(text)


def test_more_memory_than_there_is():
    with pytest.raises(BudgetError, match="more memory than there is"):
        parse_bytes("9" * 400)


@pytest.mark.parametrize(("name", "layers"), [("", 1), (None, 1), ("a", 0), ("a", "4")])
def test_stacks_are_checked(name, layers):
    with pytest.raises(StepError):
        Stack(name=name, num_layers=layers)


def test_options_of_odd_factories():
    def anything(policies, devices, first=None, **options):
        return first, options

    assert read_options(anything, [("first", "None"), ("batch", "8"), ("rate", "0.5")]) == {
        "first": None,
        "batch": 8,
        "rate": 0.5,
    }


def test_modules_that_can_not_be_imported(tmp_path, monkeypatch):
    (tmp_path / "half_written_step.py").write_text("def step(policies, devices\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StepError, match=r"importing 'half_written_step' failed: SyntaxError: .*line 1"):
        load_factory("half_written_step:step")
    (tmp_path / "raising_step.py").write_text("settings = {}['batch']\n")
    with pytest.raises(StepError, match="importing 'raising_step' failed: KeyError: 'batch'"):
        load_factory("raising_step:step")
    with pytest.raises(StepError, match="is no module: write module:function, not a path"):
        load_factory("./half_written_step.py:step")


def test_what_is_no_factory():
    with pytest.raises(StepError, match="not a step factory"):
        spell_factory(3)


def test_a_factory_s_own_error_names_its_line():
    def broken(policies, devices):
        raise KeyError("weights")

    with pytest.raises(FactoryError, match=r"KeyError.*test_edges.py:\d+, in broken"):
        build(broken, NO_REMAT, jax.devices()[:1], {})


def test_weights_inside_a_custom_vjp():
    @jax.custom_vjp
    def project(x, w):
        return x @ w

    project.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def block(w, x):
        return jnp.sin(jnp.sin(project(x, w)) @ jnp.cos(x).T)

    def dots(policy):
        wrapped = remat(block, policy, params_argnums=0)
        return str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(wrapped(w, X))))(LAYERS[0])).count("dot_general[")

    assert dots("full") - dots("none") == 2
    assert dots("weights") - dots("none") == 1


def test_source_lines_are_relative_to_the_search_path_and_unknown_ones_left_out(tmp_path, monkeypatch):
    """As in the compiled program: a value has one place, wherever the command is run."""
    (tmp_path / "somewhere_else.py").write_text("import jax.numpy as jnp\n\n\ndef wave(x):\n    return jnp.sin(x).sum()\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept = next(each for each in residuals(importlib.import_module("somewhere_else").wave, jnp.ones(3)) if each.kind == "cos")
    assert kept.source == "somewhere_else.py:5"
    all_three = [dataclasses.replace(kept, source=source) for source in (kept.source, "", f"{'deep/' * 20}x/y.py:7")]
    report = ResidualReport(findings=(), residuals=tuple(all_three), during_recompute=(), recomputed=())
    stream = io.StringIO()
    write_residuals(report, Console(file=stream, width=120))
    assert re.search(r"\n  cos at somewhere_else.py:5 .*\n  cos  .*\n  cos at …/x/y.py:7 ", stream.getvalue())
