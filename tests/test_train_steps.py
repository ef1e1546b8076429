"""The step that trains: accumulation equals the large batch, plans change nothing but what is saved, evaluation has no remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.training import OptimizerOptions, make_optimizer, make_schedule
from remat_kit import StepError, residuals
from tests.decoders import QUICK, largest, make


def state_and_batch(step, *, seed=0):
    """Arrays to start from, made without JAX."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        if leaf.dtype == "int32":
            return rng.integers(0, 256, leaf.shape, np.int32) if leaf.shape else np.int32(0)
        if path[0].idx == 1 or "'scale'" in jax.tree_util.keystr(path):
            return np.ones(leaf.shape, leaf.dtype)
        is_parameter = path[1].name == "params"
        return rng.normal(0.0, 0.02, leaf.shape).astype(leaf.dtype) if is_parameter else np.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, step.args)


def gradients(state):
    """AdamW's first moments after one step: 0.1 x the clipped gradients."""
    return state.opt_state[1][0].mu


EVEN = np.ones((8, 32), np.float32)
UNEVEN = (np.arange(32) < np.arange(1, 9)[:, None] * 4 - 3).astype(np.float32)
# Rows 1 and 5 are micro-batch 1 of 4.
HAS_EMPTY_PART = UNEVEN * ~np.isin(np.arange(8), (1, 5))[:, None]


@functools.cache
def compiled(accumulate, mesh=""):
    """A step of 8 sequences, and it compiled."""
    devices = jax.devices("cpu")[: 4 if mesh else 1]
    step = make("gpt2_tiny", "full", batch=8, accumulate=accumulate, mesh=mesh, devices=devices, weight_decay=0.1)
    return step, jax.jit(step.fn).lower(*step.args).compile(QUICK)


@pytest.mark.parametrize("mesh", ["", "data:2,fsdp:2"])
@pytest.mark.parametrize("weights", [EVEN, UNEVEN, HAS_EMPTY_PART], ids=["even", "uneven", "an empty part"])
def test_micro_batches_are_the_whole_batch(weights, mesh):
    """4 x 2 on one device, 2 x 4 on four."""
    (whole, run_whole), (_, run_parts) = compiled(1, mesh), compiled(2 if mesh else 4, mesh)
    state, batch = state_and_batch(whole)
    args = jax.device_put((state, batch | {"weights": weights}), jax.tree.map(lambda leaf: leaf.sharding, whole.args))
    (expected, its_metrics), (found, metrics) = run_whole(*args), run_parts(*args)
    assert float(metrics["loss"]) == pytest.approx(float(its_metrics["loss"]), rel=1e-6)
    difference = jax.tree.map(lambda a, b: a - b, gradients(found), gradients(expected))
    assert largest(difference) <= 2e-6 * largest(gradients(expected))


def test_a_batch_without_any_token_changes_nothing():
    """No decay, and no momentum of the step before: neither parameters nor moments nor the schedule's count."""
    step, run = compiled(4)
    state, batch = state_and_batch(step)
    warm, _ = run(state, batch)
    assert largest(gradients(warm)) > 0
    found, metrics = run(warm, batch | {"weights": np.zeros_like(batch["weights"])})
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0.0
    jax.tree.map(np.testing.assert_array_equal, found._replace(step=0), warm._replace(step=0))


@pytest.mark.slow
def test_accumulation_takes_less_memory():
    def temp_bytes(accumulate):
        step = make("gpt2_tiny", "none", batch=16, accumulate=accumulate)
        return jax.jit(step.fn, donate_argnums=0).lower(*step.args).compile(QUICK).memory_analysis().temp_size_in_bytes

    assert temp_bytes(8) < 0.5 * temp_bytes(1)


@pytest.mark.parametrize(("accumulate", "message"), [(3, "give a divisor of 8"), (0, "accumulate=0")])
def test_micro_batches_must_divide_the_batch(accumulate, message):
    with pytest.raises(StepError) as caught:
        make("gpt2_tiny", batch=8, accumulate=accumulate)
    assert message in str(caught.value)


def trained(plan, batches, state):
    """Losses of a run of f32 steps under a plan, and the step."""
    step = make("gpt2_tiny", plan, batch=2, seq=16, layers=4, learning_rate=1e-3)
    run = jax.jit(step.fn, compiler_options=QUICK, donate_argnums=0)
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, step.args[0]))
    losses = []
    for batch in batches:
        state, metrics = run(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    return np.stack(losses), step


@pytest.mark.slow
def test_losses_over_50_steps_do_not_depend_on_the_plan():
    start = make("gpt2_tiny", batch=2, seq=16, layers=4)
    first, _ = state_and_batch(start)
    batches = [state_and_batch(start, seed=seed)[1] for seed in range(5)] * 10
    plans = ("none", "full", "save(q,k,v)", "full*2 | save(attn,up)*2")
    found = {plan: trained(plan, batches, first) for plan in plans}
    saved = {plan: names_saved(step) for plan, (_, step) in found.items()}
    assert saved["full"] == set()
    assert saved["save(q,k,v)"] == {"q", "k", "v"}
    assert saved["full*2 | save(attn,up)*2"] == {"attn", "up"}
    losses = {plan: values for plan, (values, _) in found.items()}
    assert losses["full"][-1] < losses["full"][0] - 0.05
    for plan in plans[2:]:
        np.testing.assert_array_equal(losses[plan].view(np.uint32), losses["full"].view(np.uint32))
    np.testing.assert_allclose(losses["full"], losses["none"], rtol=5e-6)


def names_saved(step):
    """Names of what the step keeps for its backward pass, block inputs aside."""
    return {name for kept in residuals(step.fn, *step.args) for name in kept.names} - {"block_in"}


def test_evaluation_has_no_barrier():
    """jax-ml/jax#6098: what is not differentiated must not pay for rematerialization; a layer that is not in a loop has one."""
    plain, step = (make("gpt2_tiny", plan, layers=1) for plan in ("none", "full"))
    args = (step.args[0].params, step.args[1])
    assert "optimization_barrier" not in jax.jit(plain.evaluate).lower(*args).as_text()
    assert "optimization_barrier" in jax.jit(jax.grad(step.evaluate)).lower(*args).as_text()


def test_evaluation_is_the_loss_of_the_step():
    step = make("llama3_tiny", "full")
    state, batch = state_and_batch(step)
    loss = jax.jit(step.evaluate, compiler_options=QUICK)(state.params, batch)
    _, metrics = jax.jit(step.fn, compiler_options=QUICK)(state, batch)
    assert float(loss) == pytest.approx(float(metrics["loss"]), rel=1e-5)


def test_weights_decay_and_norms_and_biases_do_not():
    rule = make_optimizer(OptimizerOptions(learning_rate=1.0, weight_decay=0.5))
    params = make("llama3_tiny").args[0].params | {"q": {"bias": jax.ShapeDtypeStruct((4,), "float32")}}
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), params)
    change = jax.jit(lambda params: rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)[0])
    updates = change(params)
    found = {jax.tree_util.keystr(path): float(leaf.max()) for path, leaf in jax.tree_util.tree_leaves_with_path(updates)}
    assert {name for name, change in found.items() if change == 0.0} == {
        name for name in found if "scale" in name or "bias" in name
    }
    assert set(found.values()) == {0.0, -0.5}


def test_gradients_are_clipped_to_their_norm():
    rule = make_optimizer(OptimizerOptions(max_norm=0.5))
    params = {"w": jnp.ones((3, 4)), "bias": jnp.zeros(4)}
    for size, expected in ((10.0, 0.5), (0.01, 0.01)):
        grads = jax.tree.map(
            lambda leaf, size=size: np.full(leaf.shape, size / 4.0, np.float32), params
        )  # 16 entries: norm = size
        _, (_, (adam, *_)) = jax.jit(lambda grads: rule.update(grads, rule.init(params), params))(grads)
        assert float(optax.tree.norm(adam.mu)) == pytest.approx(0.1 * expected, rel=1e-5)


def test_the_schedule_warms_up_and_decays_to_a_tenth():
    schedule = make_schedule(OptimizerOptions(learning_rate=1.0, warmup=10, decay_steps=110))
    assert [round(float(schedule(step)), 4) for step in (0, 5, 10, 60, 110, 200)] == [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
    constant = make_schedule(OptimizerOptions(learning_rate=2.0, warmup=4))
    assert [float(constant(step)) for step in (0, 2, 4, 100)] == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "options", [{"learning_rate": 0.0}, {"max_norm": 0.0}, {"warmup": 5, "decay_steps": 5}, {"weight_decay": -1.0}]
)
def test_bad_optimizer_options_are_step_errors(options):
    with pytest.raises(StepError, match="must be above"):
        make("gpt2_tiny", **options)


def test_master_weights_are_f32_and_the_computation_is_not():
    step = make("gpt2_tiny", dtype="bfloat16", accumulate=2)
    assert {leaf.dtype for leaf in jax.tree.leaves(step.args[0].params)} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(step.fn)(*step.args))
    assert "bf16" in text
    state, _ = jax.eval_shape(step.fn, *step.args)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
