"""Phases of matmul FLOPs in compiled programs, against the trace and against numbers by hand. Compiled for CPU, nothing runs."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat_kit.analysis.dump import read_dump
from remat_kit.analysis.phases import phase_of
from remat_kit.analysis.work import count_work
from remat_kit.memory import StepPhase
from remat_kit.trace.step import graph_of

LAYERS, TOKENS, MODEL, FF = 4, 48, 32, 96
ONE_MATMUL_OF_ALL_LAYERS = 2 * LAYERS * TOKENS * MODEL * FF


def block(x, w):
    up = checkpoint_name(x @ w[0], "up")
    return x + jnp.sin(jnp.tanh(up) @ w[1])


def scanned(layer):
    return lambda w, x: jax.lax.scan(lambda c, ws: (layer(c, ws), None), x, w)[0]


def remat(**options):
    return jax.checkpoint(block, prevent_cse=False, **options)


def nested(w, x):
    inner = scanned(remat())
    outer = jax.checkpoint(lambda x, ws: inner(ws, x), prevent_cse=False)
    halves = jax.tree.map(lambda leaf: leaf.reshape(2, LAYERS // 2, *leaf.shape[1:]), w)
    return jax.lax.scan(lambda c, ws: (outer(c, ws), None), x, halves)[0]


@jax.custom_vjp
def by_hand(w, x):
    return scanned(block)(w, x)


def _forward(w, x):
    with jax.named_scope("remat_kit.forward"):
        y, inputs = jax.lax.scan(lambda c, ws: (block(c, ws), c), x, w)
    return y, (w, inputs)


def _backward(kept, ct):
    def one(ct, layer):
        ws, x = layer
        with jax.named_scope("remat_kit.recompute"):
            _, pull = jax.vjp(lambda c, v: block(c, v), x, ws)
        with jax.named_scope("remat_kit.backward"):
            dx, dw = pull(ct)
        return dx, dw

    with jax.named_scope("remat_kit.backward"):
        dx, dw = jax.lax.scan(one, ct, kept, reverse=True)
    return dw, dx


by_hand.defvjp(_forward, _backward)

saved = jax.checkpoint_policies.save_only_these_names
# Function -> recomputed matmuls of all layers; forward is always 2, backward 4.
CASES = {
    "none": (scanned(block), 0),
    "full": (scanned(remat()), 2),
    "named": (scanned(remat(policy=saved("up"))), 1),
    "nested": (nested, 4),
    "custom_vjp": (by_hand, 2),
}


@functools.cache
def compiled_and_traced(name, folder):
    args = (
        (jax.ShapeDtypeStruct((LAYERS, MODEL, FF), "float32"), jax.ShapeDtypeStruct((LAYERS, FF, MODEL), "float32")),
        jax.ShapeDtypeStruct((TOKENS, MODEL), "float32"),
    )
    traced = jax.jit(jax.grad(lambda w, x: (CASES[name][0](w, x) ** 2).sum(), argnums=(0, 1))).trace(*args)
    traced.lower().compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
    by_trace = collections.Counter()
    for op in graph_of(traced, args).ops:
        if op.is_live and op.flops:
            by_trace[op.phase.value] += op.flops * op.calls
    by_hlo = {each.phase.value: each.matmul_flops for each in count_work(read_dump(folder).module).phases}
    return by_hlo, by_trace


@pytest.mark.parametrize("name", CASES)
def test_phases_of_hlo_trace_and_hand_agree(name, tmp_path):
    by_hlo, by_trace = compiled_and_traced(name, tmp_path)
    by_hand_count = {"forward": 2, "recompute": CASES[name][1], "backward": 4, "update": 0}
    assert {phase: flops / ONE_MATMUL_OF_ALL_LAYERS for phase, flops in by_hlo.items()} == by_hand_count
    assert {phase: by_trace[phase] for phase in ("forward", "recompute", "backward")} == {
        phase: by_hlo[phase] for phase in ("forward", "recompute", "backward")
    }


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        ("jit(step)/jvp()/while/body/closed_call/mlp/dot_general", StepPhase.FORWARD),
        ("jit(step)/jvp()/while/body/closed_call/while/body/closed_call/checkpoint/dot_general", StepPhase.FORWARD),
        ("jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/mlp/transpose", StepPhase.BACKWARD),
        ("jit(step)/while/body/checkpoint/dot_general", StepPhase.BACKWARD),
        ("jit(step)/transpose(jvp(jvp()))/checkpoint/rematted_computation/dot_general", StepPhase.RECOMPUTE),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/remat_kit.forward/dot", StepPhase.RECOMPUTE),
        ("jit(step)/jvp(remat_kit.forward)/while/body/dot_general", StepPhase.FORWARD),
        ("jit(step)/transpose(jvp(remat_kit.backward))/while/body/remat_kit.recompute/dot", StepPhase.RECOMPUTE),
        ("jit(step)/sub", StepPhase.UPDATE),
        ("", StepPhase.UPDATE),
    ],
)
def test_phase_of_names(op_name, phase):
    assert phase_of(op_name) is phase
