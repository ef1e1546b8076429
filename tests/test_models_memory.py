"""Memory of the models as compiled for an H100, small: policies take what they promise, mixed ones lie in between."""

import jax
import pytest

import models
from remat_kit.compile.compiler import compile_lowered
from remat_kit.compile.topology import devices_for
from remat_kit.grammar import parse_plan
from remat_kit.plans import bind
from remat_kit.targets import load_rows, parse_target

LAYERS = 4
CASES = {
    "moe_tiny": {"batch": 16, "seq": 256, "attention": "xla"},
    "vit_tiny": {"batch": 16, "image": 128, "attention": "xla"},
    "gpt2_nnx_tiny": {"batch": 64, "seq": 64, "attention": "xla"},
    "llama3_tiny": {"batch": 16, "seq": 256, "attention": "xla", "lora_rank": 4, "frozen": "nf4"},
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_falls_under_remat_on_an_h100(name):
    pytest.importorskip("jax_cuda12_plugin", reason="needs remat-kit[gpu]")
    target = parse_target("h100", load_rows())
    totals = []
    for plan in ("full", f"full*{LAYERS // 2} | none*{LAYERS // 2}", "none"):
        step = getattr(models, name)(
            bind(parse_plan(plan), {"layers": LAYERS}), devices_for(target), layers=LAYERS, **CASES[name]
        )
        lowered = jax.jit(step.fn, donate_argnums=step.donate).lower(*step.args)
        totals.append(compile_lowered(lowered, target=target).device.total_bytes)
    full, mixed, none = totals
    assert full < mixed < none
    assert full < 0.6 * none
    assert (mixed - full) / (none - full) == pytest.approx(0.5, abs=0.15)
