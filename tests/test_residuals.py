"""What is kept for the backward pass and what runs again, against sets written by hand; cases from the field by their report."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from remat_kit import RematWarning, remat
from remat_kit.apply.stack import stack
from remat_kit.findings import FindingKind
from remat_kit.graph import Origin
from remat_kit.trace import residual_report, residuals

L, B, D, F = 4, 8, 16, 32
F32 = 4


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


STACK = ({"up": shape(L, D, F), "down": shape(L, F, D)}, shape(B, D))
LAYER = (shape(B, D), {"up": shape(D, F), "down": shape(F, D)})


def mlp(x, p, *, up="h"):
    h = x @ p["up"]
    for name in up.split("="):
        h = checkpoint_name(h, name)
    return checkpoint_name(x + jnp.sin(h) @ p["down"], "out")


def stack_loss(policy, block=mlp):
    def loss(params, x):
        wrapped = remat(block, policy, prevent_cse=False)
        return jax.lax.scan(lambda x, p: (wrapped(x, p), None), x, params)[0].sum()

    return loss


def kept(f, *args):
    """Names or kind, shape and rule of what needs memory of its own."""
    found = residuals(f, *args)
    return {("=".join(r.names) or r.kind, r.shape, r.rule) for r in found if r.origin is Origin.OPERATION}


CARRIES = ("loop_carry", (L, B, D), "input")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", {("cos", (L, B, F), None), ("sin", (L, B, F), None), ("loop_carry", (L, B, D), None)}),
        ("full", {CARRIES}),
        ("save(h)", {CARRIES, ("h", (L, B, F), "save(h)")}),
        ("save(*)+recompute(h)", {CARRIES}),
        ("dots", {CARRIES, ("h", (L, B, F), "dots")}),
        ("smaller(1KiB)+recompute(h)", {CARRIES, ("sin", (L, B, F), "smaller(1KiB)"), ("cos", (L, B, F), "smaller(1KiB)")}),
    ],
)
def test_a_scanned_stack_keeps_its_carries_and_what_the_policy_saves(policy, expected):
    found = kept(stack_loss(policy), *STACK)
    if policy.startswith("smaller"):  # also keeps the matmul itself, which the policy forbids by its name only
        found.discard(("h", (L, B, F), "smaller(1KiB)"))
    assert found == expected


def test_arguments_are_listed_by_their_name_and_take_no_memory_of_their_own():
    arguments = [r for r in residuals(stack_loss("full"), *STACK) if r.origin is Origin.ARGUMENT]
    assert sorted((r.source, r.shape, r.rule) for r in arguments) == [
        ("args[0]['down']", (L, F, D), "input"),
        ("args[0]['up']", (L, D, F), "input"),
    ]


def test_a_whole_step_is_read_as_it_is():
    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(stack_loss("save(h)"))(params, x))

    assert kept(step, *STACK) == kept(stack_loss("save(h)"), *STACK)
    named = next(r for r in residuals(step, *STACK) if r.names)
    assert (named.num_layers, named.num_bytes, named.device_bytes, named.is_on_host) == (
        L,
        L * B * F * F32,
        L * B * F * F32,
        False,
    )
    assert named.source.startswith("tests/test_residuals.py:")


# jax-ml/jax#20285: names are found where print_saved_residuals shows "output of jit / scan / shard_map / device_put".


def test_a_name_is_found_through_jit():
    assert kept(jax.jit(remat(jax.jit(mlp), "save(h)")), *LAYER) == {("h", (B, F), "save(h)")}


def test_a_name_is_found_through_nested_scans():
    def loss(params, x):
        def group(x, p):
            return jax.lax.scan(lambda x, p: (remat(mlp, "save(h)", prevent_cse=False)(x, p), None), x, p)[0]

        return jax.lax.scan(lambda x, p: (group(x, p), None), x, params)[0].sum()

    params = {"up": shape(3, L, D, F), "down": shape(3, L, F, D)}
    found = kept(loss, params, shape(B, D))
    assert found == {("h", (3, L, B, F), "save(h)"), ("loop_carry", (3, L, B, D), "input")}
    assert next(r for r in residuals(loss, params, shape(B, D)) if r.names).num_layers == 3 * L


def test_a_name_is_found_through_vmap():
    batched = (shape(5, B, D), {"up": shape(5, D, F), "down": shape(5, F, D)})
    assert kept(jax.vmap(remat(mlp, "save(h)")), *batched) == {("h", (5, B, F), "save(h)")}


def test_a_name_is_found_through_shard_map_with_bytes_per_device():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def block(x, p):
        specs = (P("data"), {"up": P(None, "model"), "down": P("model")})
        return jax.shard_map(lambda x, p: jax.lax.psum(mlp(x, p), "model"), mesh=mesh, in_specs=specs, out_specs=P("data"))(x, p)

    named = next(r for r in residuals(remat(block, "save(h)"), *LAYER) if "h" in r.names)
    assert (named.shape, named.num_bytes, named.device_bytes) == ((B // 4, F // 2), B * F * F32, B * F * F32 // 8)
    stacked = next(r for r in residuals(stack_loss("save(h)", block), *STACK) if "h" in r.names)
    assert (stacked.shape, stacked.num_layers, stacked.device_bytes) == ((L, B // 4, F // 2), L, L * B * F * F32 // 8)


def test_a_sharding_constraint_gives_the_bytes_per_device():
    sharding = NamedSharding(Mesh(jax.devices()[:8], ("data",)), P("data"))

    def block(x, p):
        return jnp.sin(checkpoint_name(jax.lax.with_sharding_constraint(x @ p["up"], sharding), "h")) @ p["down"]

    named = next(r for r in residuals(remat(block, "save(h)"), *LAYER) if r.names)
    assert (named.num_bytes, named.device_bytes) == (B * F * F32, B * F * F32 // 8)


def test_a_name_is_found_through_reshape_and_transposition():
    def block(x, p):
        h = checkpoint_name((x @ p["up"]).reshape(B, 2, F // 2).transpose(1, 0, 2), "h")
        return jnp.sin(h).transpose(1, 0, 2).reshape(B, F) @ p["down"]

    assert [r.names for r in residuals(remat(block, "save(h)"), *LAYER) if r.origin is Origin.OPERATION] == [("h",)]


def test_a_name_inside_a_custom_vjp_is_found():
    @jax.custom_vjp
    def activation(x, w):
        return jnp.sin(x @ w)

    def forward(x, w):
        y = checkpoint_name(x @ w, "y")
        return jnp.sin(y), (x, w, y)

    def backward(saved, ct):
        x, w, y = saved
        ct = ct * jnp.cos(y)
        return ct @ w.T, x.T @ ct

    activation.defvjp(forward, backward)
    args = (shape(B, D), shape(D, F))
    assert kept(remat(lambda x, w: activation(jnp.sin(x), w), "save(y)"), *args) == {("y", (B, F), "save(y)")}


# openxla/xla#17541: what survives a rematted scan body is its input; naming its output offloads nothing.


def test_offloading_a_blocks_output_by_name_saves_nothing_and_says_so():
    with pytest.warns(RematWarning, match="'mlp': out is never saved, as it is only returned.*name that input"):
        report = residual_report(stack_loss("offload(out)"), *STACK)
    assert [(finding.kind, finding.names) for finding in report.findings] == [(FindingKind.NEVER_RESIDUAL, ("out",))]
    assert "name that input" in report.findings[0].message
    carries = [r for r in report.residuals if r.origin is Origin.OPERATION]
    assert [(r.kind, r.num_bytes, r.is_on_host) for r in carries] == [("loop_carry", L * B * D * F32, False)]


@pytest.mark.parametrize(
    ("policy", "on_host", "on_device"),
    [("offload(in)", {"in": B * D}, {}), ("offload(h)", {"h": B * F}, {"in": B * D}), ("save(h)", {}, {"h": B * F, "in": B * D})],
)
def test_what_is_offloaded_leaves_the_device(policy, on_host, on_device):
    report = residual_report(stack_loss(policy, lambda x, p: mlp(checkpoint_name(x, "in"), p)), *STACK)
    found = [r for r in report.residuals if r.origin is Origin.OPERATION]
    assert {r.names[0]: r.num_bytes for r in found if r.is_on_host} == {name: L * F32 * size for name, size in on_host.items()}
    assert {r.names[0]: r.num_bytes for r in found if not r.is_on_host} == {
        name: L * F32 * size for name, size in on_device.items()
    }
    assert report.findings == ()


# AI-Hypercomputer/maxtext#4005: a value with two names is one residual, kept when either is asked for.


@pytest.mark.parametrize("asked", ["wi", "moe_wi"])
def test_a_value_with_two_names_is_listed_once_with_both(asked):
    block = functools.partial(mlp, up="wi=moe_wi")
    assert kept(stack_loss(f"save({asked})", block), *STACK) == {CARRIES, ("wi=moe_wi", (L, B, F), f"save({asked})")}


def test_full_remat_of_an_unrolled_stack_keeps_no_more_than_inputs():
    def loss(params, x):
        for layer in range(L):
            x = remat(mlp, "full")(x, jax.tree.map(lambda p: p[layer], params))  # noqa: B023 (run at once)
        return x.sum()

    found = residuals(loss, *STACK)
    assert {r.rule for r in found} == {"input"}
    assert sorted(r.kind for r in found if r.names) == ["add"] * (L - 1)  # each block's output is the next one's input
    assert sum(r.kind == "slice" for r in found) == 2 * L  # and the weights, sliced outside the region


# jax-ml/jax#26374 and maxtext#1805: a kernel is run again unless its output and its statistics are both named inside its rule.


def flash(*, is_named_inside):
    def kernel(x_ref, o_ref, lse_ref):
        o_ref[...] = x_ref[...]
        lse_ref[...] = x_ref[...]

    run = pl.pallas_call(kernel, out_shape=(shape(B, D), shape(B, D)), name="flash")

    @jax.custom_vjp
    def attend(x):
        return run(x)[0]

    def forward(x):
        o, lse = run(x)
        if is_named_inside:
            o, lse = checkpoint_name(o, "o"), checkpoint_name(lse, "lse")
        return o, (x, o, lse)

    attend.defvjp(forward, lambda saved, ct: (ct * saved[0] * saved[1] * saved[2],))
    return attend


def test_a_kernel_whose_output_alone_is_named_runs_again_and_the_report_says_why():
    attend = flash(is_named_inside=False)
    report = residual_report(
        remat(lambda x, w: checkpoint_name(attend(jnp.sin(x)), "o") @ w, "save(o)"), shape(B, D), shape(D, F)
    )
    (finding,) = report.findings
    assert (finding.kind, finding.names, finding.bytes_at_stake, finding.flops_at_stake) == (
        "saved_but_recomputed",
        ("o",),
        B * D * F32,
        None,
    )
    assert any(need.startswith("result 1 of flash (tests/test_residuals.py:") for need in finding.needed_by)
    assert finding.message.startswith("o is saved, but flash (tests/")
    assert [(op.calls, op.forward_calls) for op in report.recomputed if op.kind == "pallas_call"] == [(1, 1)]


def test_a_kernel_whose_statistics_are_named_too_runs_once():
    attend = flash(is_named_inside=True)
    report = residual_report(remat(lambda x, w: attend(jnp.sin(x)) @ w, "save(o,lse)"), shape(B, D), shape(D, F))
    assert report.findings == ()
    assert {r.names for r in report.residuals if r.names} == {("o",), ("lse",)}
    assert [op.kind for op in report.recomputed if op.kind == "pallas_call"] == []


def test_a_saved_activation_whose_matmul_runs_again_is_found():
    def block(x, p):
        return x + checkpoint_name(jnp.tanh(jnp.sin(x @ p["up"])), "act") @ p["down"]

    report = residual_report(stack_loss("save(act)", block), *STACK)
    (finding,) = report.findings
    assert (finding.names, finding.bytes_at_stake, finding.flops_at_stake) == (("act",), L * B * F * F32, L * 2 * B * D * F)
    assert [need.rsplit(":")[0] for need in finding.needed_by] == ["the unnamed cos (tests/test_residuals.py"]
    clean = residual_report(stack_loss("save(h)"), *STACK)
    assert clean.findings == ()


def unrolled_loss(policy, block):
    def loss(params, x):
        for layer in range(L):
            x = remat(block, policy)(x, jax.tree.map(lambda p: p[layer], params))  # noqa: B023 (run at once)
        return x.sum()

    return loss


@pytest.mark.parametrize("policy", ["full", "save(in)"])
def test_a_layer_s_kept_input_is_not_held_against_the_layer_s_own_matmuls(policy):
    """Unrolled layers run the same code: what made a layer's input, in the layer before, does not run again for it."""

    def block(x, p):
        x = checkpoint_name(x, "in")
        return x + jnp.sin(jnp.sin(x @ p["up"]) @ p["down"])

    report = residual_report(unrolled_loss(policy, block), *STACK)
    assert [finding.kind for finding in report.findings if "in" in finding.names] == []


def test_saved_activations_of_unrolled_layers_are_one_finding():
    def block(x, p):
        return x + checkpoint_name(jnp.tanh(jnp.sin(x @ p["up"])), "act") @ p["down"]

    (finding,) = residual_report(unrolled_loss("save(act)", block), *STACK).findings
    assert finding.message.startswith(f"act, in {L} layers, is saved, but dot_general")
    assert (finding.names, finding.bytes_at_stake, finding.flops_at_stake) == (("act",), L * B * F * F32, L * 2 * B * D * F)


def test_values_named_by_layer_are_one_finding():
    def block(x, p, layer):
        return x + checkpoint_name(jnp.tanh(jnp.sin(x @ p["up"])), f"h/{layer}/act") @ p["down"]

    def loss(params, x):
        for layer in range(L):
            x = remat(functools.partial(block, layer=layer), "save(*/act)")(x, jax.tree.map(lambda p: p[layer], params))  # noqa: B023
        return x.sum()

    (finding,) = residual_report(loss, *STACK).findings
    assert (len(finding.names), finding.bytes_at_stake) == (L, L * B * F * F32)
    assert f"like its namesakes in {L - 1} more layers" in finding.message


def test_recomputation_is_told_per_operation():
    def block(x, p):
        return checkpoint_name(x + jnp.sin(x @ p["up"]) @ p["down"], "out")

    report = residual_report(stack_loss("full", block), *STACK)
    (dot,) = (op for op in report.recomputed if op.kind == "dot_general")
    assert (dot.shape, dot.calls, dot.forward_calls, dot.flops) == ((B, F), L, L, L * 2 * B * D * F)
    assert dot.num_bytes == L * F32 * (B * D + D * F + B * F)
    with pytest.warns(RematWarning, match="rematerialized already"):
        nested = residual_report(stack_loss("full", jax.checkpoint(block)), *STACK)
    # The inner region makes the matmul again for its gradient; the outer one needs nothing of it.
    assert [(op.calls, op.forward_calls) for op in nested.recomputed if op.kind == "dot_general"] == [(L, L)]


# jax-ml/jax#18817: an outer region makes the inner ones' residuals vanish; they come back while it is recomputed.


def test_an_outer_region_moves_the_inner_residuals_to_its_recomputation():
    inner = remat(lambda x: jnp.sin(jnp.sin(x)), "full")

    def four(x):
        return inner(inner(inner(inner(x))))

    alone, wrapped = residual_report(four, shape(D)), residual_report(remat(four, "full"), shape(D))
    assert [r.origin for r in alone.residuals] == [Origin.OPERATION] * 3 + [Origin.ARGUMENT]
    assert [r.origin for r in wrapped.residuals] == [Origin.ARGUMENT]
    held_by_outer = [r for r in wrapped.during_recompute if r.region == 0]
    assert [r.kind for r in held_by_outer] == ["sin"] * 3
    assert {r.region for r in wrapped.during_recompute} == {
        0,
        1,
        2,
        3,
        4,
    }  # and the inner ones hold what their own gradients need


# apple/axlearn#1171: where the policy stands, around the loop or in its body, decides whether the carries are stacked.


def test_a_policy_around_the_loop_keeps_no_carries_but_runs_the_loop_again():
    def loop(block):
        return lambda params, x: jax.lax.scan(lambda x, p: (block(x, p), None), x, params)[0]

    inside = residual_report(loop(remat(mlp, "save(h)", prevent_cse=False)), *STACK)
    around = residual_report(remat(loop(mlp), "save(h)"), *STACK)
    both = residual_report(remat(loop(remat(mlp, "save(h)", prevent_cse=False)), "save(h)"), *STACK)
    stacked = [
        {"=".join(r.names) or r.kind for r in report.residuals if r.origin is Origin.OPERATION}
        for report in (inside, around, both)
    ]
    assert stacked == [{"h", "loop_carry"}, {"h"}, {"h"}]
    matmuls = [sum(op.calls for op in report.recomputed if op.kind == "dot_general") for report in (inside, around, both)]
    assert matmuls == [0, L, L]


def test_a_mixed_stack_keeps_of_each_segment_what_its_policy_says():
    def loss(params, x):
        return stack(lambda p, x: mlp(x, p), params, x, "full*2 | save(h)*2").sum()

    report = residual_report(loss, *STACK)
    found = [("=".join(r.names) or r.kind, r.shape, r.rule) for r in report.residuals if r.origin is Origin.OPERATION]
    assert sorted(found) == [("h", (2, B, F), "save(h)"), *[("loop_carry", (2, B, D), "input")] * 2]
    assert [(op.names, op.calls, op.forward_calls) for op in report.recomputed if op.kind == "dot_general"] == [(("h",), 2, L)]


@pytest.mark.parametrize(("plan", "layers"), [("full*1 | save(act)*3", 3), ("save(act)*2 | save(act) + smaller(1)*2", 4)])
def test_a_mixed_stack_says_what_saved_activations_do_not_prevent(plan, layers):
    def block(p, x):
        return x + checkpoint_name(jnp.tanh(jnp.sin(x @ p["up"])), "act") @ p["down"]

    report = residual_report(lambda params, x: stack(block, params, x, plan).sum(), *STACK)
    (finding,) = report.findings
    assert (finding.names, finding.bytes_at_stake, finding.flops_at_stake) == (
        ("act",),
        layers * B * F * F32,
        layers * 2 * B * D * F,
    )
    assert finding.message.startswith("act is saved" if layers < L else f"act, in {L} layers, is saved")


def test_matmuls_of_one_helper_are_told_apart_by_who_calls_it():
    def dense(x, w):
        return x @ w

    def block(x, p):
        q = checkpoint_name(dense(x, p["q"]), "q")
        k = dense(x, p["k"])
        return x + jnp.sin(q) * jnp.sin(k)

    params = {"q": shape(L, D, D), "k": shape(L, D, D)}
    report = residual_report(stack_loss("save(q)", block), params, shape(B, D))
    assert report.findings == ()  # only k runs again
    assert [(op.calls, op.forward_calls) for op in report.recomputed if op.kind == "dot_general"] == [(L, L)]
