"""Memory of mixed stacks, as compiled for accelerators: on or below the straight line between two plain scans."""

import jax
import pytest

from benchmarks.mixed_stack import NUM_LAYERS, mlp_step
from remat_kit.compile.compiler import compile_lowered
from remat_kit.compile.topology import devices_for
from remat_kit.grammar import parse_plan
from remat_kit.plans import bind
from remat_kit.targets import load_rows, parse_target

ROWS = load_rows()


def total_bytes(target, plan):
    step = mlp_step(bind(parse_plan(plan), {"layers": NUM_LAYERS}), devices_for(target))
    lowered = jax.jit(step.fn, donate_argnums=step.donate).lower(*step.args)
    return compile_lowered(lowered, target=target).device.total_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["h100", "h100:8", *(pytest.param(text, marks=pytest.mark.long) for text in ("v5p", "v5p:2x2x1"))]
)
def test_on_or_below_the_line(text):
    target = parse_target(text, ROWS)
    pytest.importorskip("libtpu" if target.platform == "tpu" else "jax_cuda12_plugin", reason="needs remat-kit[gpu,tpu]")
    full, saved = (total_bytes(target, plan) for plan in ("full", "save(h)"))
    totals = {count: total_bytes(target, f"full*{NUM_LAYERS - count} | save(h)*{count}") for count in (4, 8, 12)}
    above = {count: (total - full) / (saved - full) - count / NUM_LAYERS for count, total in totals.items()}
    assert max(above.values()) <= 0.03, above
    assert [full, *totals.values(), saved] == sorted([full, *totals.values(), saved])
