"""Faults that people reported of policies and their names, each with the value that shows its absence.

One test for each row of the kinds offload, name, version and matmul, named for the fault; the docstring has the report. The
others are in `test_cases_structure.py`, and what only a compiler shows in `test_cases_compiled.py`.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from apply_oracles import (
    assert_equal,
    num_matmuls,
    num_regions,
)
from jax.ad_checkpoint import checkpoint_name

from remat_kit import PolicyError, RematWarning, parse_policy, remat, residual_report, stack
from remat_kit.errors import IdleRuleWarning
from remat_kit.verbs.parity import check_parity
from tests.cases import ONE, PARAMS, B, D, F, L, X, block, loss, remat3, saved, unrolled

# Offload


@pytest.mark.parametrize("plan", ["offload(out)", "offload(out)*6 | full"])
def test_offloading_the_name_of_a_blocks_output_warns_and_moves_nothing(plan):
    """openxla/xla#17541 (jax#23869): nothing was offloaded, without a word."""
    with pytest.warns(IdleRuleWarning, match=r"offload\(out\) for 'block': out is never saved.*name that input"):
        found = saved(lambda params: loss(plan, params), PARAMS)
    assert not any(on_host for _, on_host in found.values())
    with pytest.warns(IdleRuleWarning, match="out is never saved"):
        jax.make_jaxpr(jax.grad(lambda params: unrolled("offload(out)", params, X)))(PARAMS)


def test_offloading_the_blocks_input_moves_every_carry():
    """openxla/xla#17541: with the input named, host bytes are L carries and the stack on the device is gone."""
    carries = L * B * D * 4
    assert saved(lambda params: loss("offload(in)", params), PARAMS) == {"in": (carries, True)}
    assert saved(lambda params: loss("full", params), PARAMS) == {"in": (carries, False)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_saved_and_plain_gradients_agree(dtype):
    """openxla/xla#46231: gradients of offloaded values were silently wrong on GPU. On CPU the check says that it can't tell."""
    params, x = jax.tree.map(lambda leaf: leaf.astype(dtype), (PARAMS, X))
    report = check_parity(
        lambda plan: lambda params: loss(plan, params, x), params, policies=("none", "save(h)", "offload(h)", "full*4 | save(h)")
    )
    assert report.agrees and report.platform == "cpu"
    assert {row.bound for row in report.rows} == {{"float32": 2e-6, "bfloat16": 1e-2}[dtype]}
    assert any("CPU ignores the host memory" in note for note in report.notes)
    assert any("Not bitwise" in note for note in report.notes)


def test_the_parity_check_finds_layers_read_in_the_wrong_order():
    """openxla/xla#46231: its fault, planted: the backward pass reads what it kept of layer i for layer L - 1 - i."""

    def build(policy):
        if policy == "none":
            return lambda params: loss("none", params)

        @jax.custom_vjp
        def broken(params):
            return loss("none", params)

        def backward(params, ct):
            grads = jax.grad(lambda params: loss("none", params))(params)
            return (jax.tree.map(lambda leaf: ct * leaf[::-1], grads),)

        broken.defvjp(lambda params: (loss("none", params), params), backward)
        return broken

    report = check_parity(build, PARAMS, policies=("none", "offload(h)"))
    assert not report.agrees and report.rows[0].difference > 0.1
    with pytest.raises(PolicyError, match="at least two"):
        check_parity(build, PARAMS, policies=["none"])


def test_a_comparison_for_gpus_notes_that_the_version_gets_offloading_wrong():
    """openxla/xla#46231: 0.10.2 and 0.11.0 have the fault; with the pass that makes it off, nothing is said."""
    from remat_kit import _jax
    from remat_kit.verbs.measure import measure
    from remat_kit.verbs.question import Question

    pytest.importorskip("jax_cuda12_plugin", reason="needs remat-kit[gpu]")
    asked = Question(factory="tests.steps:mlp", policy="offload(up)", target="h100")
    off = (("xla_disable_hlo_passes", "dynamic-slice-annotator"),)
    noted = {
        name: any("wrong order" in note for note in measure(question).notes)
        for name, question in {
            "offload": asked,
            "save": dataclasses.replace(asked, policy="save(up)"),
            "pass off": dataclasses.replace(asked, xla=off),
        }.items()
    }
    assert noted == {"offload": _jax.GPU_OFFLOAD_FAULT is not None, "save": False, "pass off": False}


@pytest.mark.gpu
def test_offloaded_gradients_agree_on_a_gpu_or_the_version_is_warned_of():
    """openxla/xla#46231: only a GPU runs the transfers."""
    from remat_kit import _jax

    expected = contextlib.nullcontext() if _jax.GPU_OFFLOAD_FAULT is None else pytest.warns(RematWarning, match="wrong order")
    with expected:
        report = check_parity(
            lambda plan: lambda params: loss(plan, params), PARAMS, policies=("none", "save(h)", "offload(h)", "offload(in)")
        )
    assert report.platform == "gpu"
    assert report.agrees == (_jax.GPU_OFFLOAD_FAULT is None)


def test_offload_save_and_matmuls_join_in_one_policy_and_the_last_rule_wins():
    """jax-ml/jax#23831: joining them raised an obscure type error."""

    def one(params, x):
        h = checkpoint_name(x @ params["up"], "h")
        y = checkpoint_name(jnp.tanh(h) @ params["down"], "y")
        return jnp.sin(y) @ params["up"]

    def kept(policy):
        report = residual_report(remat(one, policy), ONE, X)
        return {(each.names, each.is_on_host) for each in report.residuals if each.names}

    assert kept("offload(h)+save(y)") == kept("dots+offload(h)") == {(("h",), True), (("y",), False)}
    assert kept("offload(*)+recompute(h)") == {(("y",), True)}
    with pytest.raises(PolicyError, match=r"offload\(h\) and save\(h\) both speak of 'h'"):
        parse_policy("offload(h)+save(h)")


@pytest.mark.parametrize("num_layers", [1, 2])
def test_offload_in_a_stack_of_one_layer(num_layers):
    """AI-Hypercomputer/maxtext#4530: a loop of one iteration broke it. Here it is no loop; bytes are in the compiled cases."""
    params = jax.tree.map(lambda leaf: leaf[:num_layers], PARAMS)
    grads = [jax.jit(jax.grad(lambda params, plan=plan: loss(plan, params)))(params) for plan in ("offload(h)", "full")]
    assert_equal(*grads)
    report = residual_report(lambda params: loss("offload(h)", params), params)
    (on_host,) = [each for each in report.residuals if each.is_on_host]
    assert (on_host.names, on_host.num_bytes) == (("h",), num_layers * B * F * 4)


# Names


def test_a_name_that_nothing_has_warns_with_the_near_miss():
    """NVIDIA/JAX-Toolbox#982: the residuals were those of full remat, without a word. maxtext#4005: after a tag was renamed."""
    wanted = r"save\(hh\) for 'block': no value is named 'hh'.*Names there: in, h, out. Did you mean 'h'"
    for run in (lambda: unrolled("save(hh)", PARAMS, X), lambda: loss("save(hh)"), lambda: loss("save(hh)*3 | full")):
        with pytest.warns(IdleRuleWarning, match=wanted):
            run()


def test_a_mistyped_preset_names_the_near_miss():
    """NVIDIA/JAX-Toolbox#982: a free text chose the preset."""
    with pytest.raises(PolicyError, match=r"unknown policy 'minimal_flsh'.*Did you mean 'minimal"):
        parse_policy("minimal_flsh")


def test_there_is_no_memory_kind_to_mistype():
    """NVIDIA/JAX-Toolbox#982: 'pinned_hostt' compiled. A policy names values only; one constant names the memory."""
    with pytest.warns(IdleRuleWarning, match="no value is named 'pinned_hostt'"):
        loss("offload(h,pinned_hostt)")
    text = str(jax.make_jaxpr(jax.grad(lambda params: loss("offload(h)", params)))(PARAMS))
    assert "Host" in text or "<host>" in text


@pytest.mark.parametrize("asked", ["wi", "moe_wi"])
def test_a_value_with_two_names_is_kept_once_by_either(asked):
    """AI-Hypercomputer/maxtext#4005: the repair tagged one value twice."""

    def twice(params, x):
        h = checkpoint_name(checkpoint_name(x @ params["up"], "wi"), "moe_wi")
        return x + jnp.tanh(h) @ params["down"]

    found = saved(lambda params: (stack(twice, params, X, f"save({asked})") ** 2).sum(), PARAMS)
    assert found == {"loop_carry": (L * B * D * 4, False), "wi=moe_wi": (L * B * F * 4, False)}


def test_full_and_none_are_told_apart_in_stacks():
    """AI-Hypercomputer/maxtext#4288: "full" was None, and None was "off"."""
    for plan, in_scan, in_loop in (("full", 1, L), ("none", 0, 0)):
        assert num_regions(jax.grad(lambda params, plan=plan: loss(plan, params)), PARAMS) == in_scan
        assert num_regions(jax.grad(lambda params, plan=plan: unrolled(plan, params, X)), PARAMS) == in_loop
    assert "h" not in saved(lambda params: loss("full", params), PARAMS)


# Versions


@pytest.mark.parametrize(
    ("policy", "under_remat3"),
    [
        ("full", "same"),
        ("save(h)", "same"),
        ("save(*)+recompute(in,out)", "same"),
        ("offload(h)", "same since 0.12"),
        ("dots", "refused"),
        ("kernels", "refused"),
        ("smaller(1MiB)", "refused"),
    ],
)
def test_the_new_implementation_saves_the_same_or_refuses(policy, under_remat3):
    """jax-ml/jax#39432, #37888: policies it does not understand were taken for "save nothing"."""
    again = lambda: num_matmuls(jax.grad(lambda params: loss(policy, params)), PARAMS)  # noqa: E731
    classic = again()
    is_same = under_remat3 == "same" or (under_remat3 != "refused" and jax.__version_info__ >= (0, 12))
    with remat3():
        if is_same:
            assert again() == classic
        else:
            with pytest.raises(PolicyError, match="can't be expressed with jax_remat3"):
                again()


def test_names_under_vmap_are_saved_or_refused_by_the_new_implementation():
    """jax-ml/jax#39432: vmap of a named value raises NotImplementedError in 0.10.2."""
    run = jax.grad(lambda params, xs: jax.vmap(lambda x: unrolled("save(h)", params, x))(xs).sum())
    xs = jnp.stack([X, X])
    classic = num_matmuls(run, PARAMS, xs)
    with remat3():
        if jax.__version_info__ >= (0, 12):
            assert num_matmuls(run, PARAMS, xs) == classic
        else:
            with pytest.raises((PolicyError, NotImplementedError)):
                num_matmuls(run, PARAMS, xs)


# Matmuls


def expert_block(params, x):
    h = jnp.einsum("ebd,edf->ebf", x, params["up"])
    return x + jnp.einsum("ebf,efd->ebd", jnp.tanh(h), params["down"])


def test_expert_matmuls_are_kept_when_asked_and_the_report_says_why_not():
    """AI-Hypercomputer/maxtext#2207: the rule without batch dimensions kept nothing of expert layers."""
    xs = jnp.stack([X] * L)

    def matmuls(policy):
        run = remat(expert_block, policy, params_argnums=0)
        return num_matmuls(jax.grad(lambda params: run(params, xs).sum()), PARAMS)

    extra = {policy: matmuls(policy) for policy in ("none", "full", "weights", "dots", "dots_no_batch")}
    assert extra["weights"] == extra["dots"] == extra["none"] and extra["full"] == extra["dots_no_batch"] == extra["none"] + 1
    report = residual_report(remat(expert_block, "dots_no_batch"), PARAMS, xs)
    (finding,) = report.findings
    assert finding.message.startswith("dots_no_batch keeps nothing: dot_general (tests/test_cases_policy.py:")
    assert "batch dimensions" in finding.message and finding.flops_at_stake == 2 * L * B * D * F
    assert residual_report(remat(expert_block, "weights", params_argnums=0), PARAMS, xs).findings == ()
    assert residual_report(remat(block, "dots_no_batch"), ONE, X).findings == ()


def test_matmuls_by_weights_are_kept_under_vmap_and_nested_regions_are_counted():
    """AI-Hypercomputer/maxtext#971: vmap over stages kept nothing; a policy at two levels ran everything twice."""
    stages = jax.tree.map(lambda leaf: leaf[:2], PARAMS)
    xs = jnp.stack([X, X])

    def extra(policy):
        run = jax.vmap(remat(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"], policy, params_argnums=0))
        return num_matmuls(jax.grad(lambda p: run(p, xs).sum()), stages)

    assert extra("weights") == extra("none") == extra("full") - 1
    twice = remat(lambda p, x: remat(block, "full")(p, remat(block, "full")(p, x)), "full")
    report = residual_report(twice, ONE, X)
    again = {(each.calls, each.forward_calls) for each in report.recomputed if each.kind == "dot_general" and "h" in each.names}
    assert again == {(3, 2)}  # the outer region runs both blocks again, but of the second only what its own region needs
