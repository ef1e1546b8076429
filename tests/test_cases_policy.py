"""Faults that people reported of rematerialization policies, each with the value that shows its absence.

One test for each row of those of the kinds offload, name, version, placement, matmul, stack, Flax, kernel and random numbers,
named for the fault; the docstring has the report. What only a compiler shows is in `test_cases_compiled.py`.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from apply_oracles import (
    assert_close,
    assert_equal,
    count,
    num_barriers,
    num_matmuls,
    num_regions,
)
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit import PolicyError, RematWarning, parse_policy, remat, residual_report, stack
from remat_kit.errors import IdleRuleWarning
from remat_kit.graph import Origin
from remat_kit.verbs.parity import check_parity

L, B, D, F = 12, 4, 6, 10
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"up": jax.random.normal(KEYS[0], (L, D, F)) / 3, "down": jax.random.normal(KEYS[1], (L, F, D)) / 3}
ONE = jax.tree.map(lambda leaf: leaf[0], PARAMS)
X = jax.random.normal(KEYS[2], (B, D))


def block(params, x):
    x = checkpoint_name(x, "in")
    h = checkpoint_name(x @ params["up"], "h")
    return checkpoint_name(x + jnp.tanh(h) @ params["down"], "out")


def loss(plan, params=PARAMS, x=X, **options):
    return (stack(block, params, x, plan, **options) ** 2).sum()


def unrolled(policy, params, x):
    wrapped = remat(block, policy)
    for layer in range(L):
        x = wrapped(jax.tree.map(lambda leaf, layer=layer: leaf[layer], params), x)
    return (x**2).sum()


def saved(f, *args):
    """What needs memory of its own: name or kind -> bytes and whether on the host."""
    kept = [each for each in residual_report(f, *args).residuals if each.origin is Origin.OPERATION and each.num_layers > 1]
    return {"=".join(each.names) or each.kind: (each.num_bytes, each.is_on_host) for each in kept}


@contextlib.contextmanager
def remat3():
    jax.config.update("jax_remat3", True)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", False)


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
    assert kept("offload(h)+recompute(h)+save(y)") == {(("y",), False)}
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
