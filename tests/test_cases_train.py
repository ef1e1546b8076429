"""Reports from the field about training, one test each, with the right value; the report is named in the test."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.sharding import Layout
from models.training import TrainState, update
from train.checkpoints import Checkpoints, Record, described_leaves
from train.errors import TrainWarning
from train.loop import checks_donation
from train.state import buffer_addresses, fingerprints, reused_share

# orbax drops the futures of a checkpoint that could not be read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WIDTH = 1024
PARAMETER_BYTES = WIDTH * WIDTH * 4


def linear_loss(params, batch):
    """Mean squared error of one weight, weighted."""
    weights = batch["weights"]
    errors = ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(-1)
    return (errors * weights).sum() / jnp.maximum(weights.sum(), 1e-6)


def compiled(optimizer, accumulate):
    """The compiler's memory of a donated AdamW step on one 1024 x 1024 weight, and the step."""
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here)

    params = {"w": of(WIDTH, WIDTH)}
    opt_state = jax.eval_shape(optimizer.init, params)
    state = TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32))
    batch = {"x": of(64, WIDTH), "y": of(64, WIDTH), "weights": of(64)}

    def fn(state, batch):
        return update(state, batch, loss=linear_loss, optimizer=optimizer, layout=Layout(devices=()), accumulate=accumulate)

    return jax.jit(fn, donate_argnums=0).lower(state, batch).compile().memory_analysis()


def test_optax_472_accumulation_keeps_nothing_in_the_state_and_one_sum_of_gradients():
    """Wrapping the optimizer for accumulation holds parameter-sized state and builds zero updates on the side."""
    adamw = optax.adamw(1e-3)
    own, wrapped = compiled(adamw, 4), compiled(optax.MultiSteps(adamw, 4), 1)
    plain = compiled(adamw, 1)
    assert own.argument_size_in_bytes == plain.argument_size_in_bytes
    assert wrapped.argument_size_in_bytes >= plain.argument_size_in_bytes + PARAMETER_BYTES
    assert own.temp_size_in_bytes < 3.5 * PARAMETER_BYTES
    assert own.alias_size_in_bytes >= 3 * PARAMETER_BYTES


def test_levanter_842_micro_batches_count_by_their_tokens():
    """The mean of means is off when micro-batches have different numbers of unmasked tokens, and NaN when one has none."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(64, 32)).astype(np.float32),
        "y": rng.normal(size=(64, 8)).astype(np.float32),
        "weights": np.zeros(64, np.float32),
    }
    for part, share in enumerate((0.1, 0.4, 1.0, 0.0)):  # micro-batch a has the rows a, a + 4, …
        batch["weights"][part::4][: int(16 * share)] = 1
    params = {"w": rng.normal(size=(32, 8)).astype(np.float32)}
    plain = optax.sgd(1.0)

    def gradient(accumulate):
        state = TrainState(params, plain.init(params), jnp.zeros((), jnp.int32))
        after, metrics = update(state, batch, loss=linear_loss, optimizer=plain, layout=Layout(devices=()), accumulate=accumulate)
        return params["w"] - np.asarray(after.params["w"]), float(metrics["loss"])

    expected = jax.grad(linear_loss)(params, batch)["w"]
    found, loss = gradient(4)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert loss == pytest.approx(float(linear_loss(params, batch)), rel=1e-6)
    means = [jax.grad(linear_loss)(params, {name: x[part::4] for name, x in batch.items()})["w"] for part in range(4)]
    assert abs(sum(means) / 4 - expected).max() > 0.2 * abs(expected).max(), "the input tells the two apart"


def record(step, state):
    return Record(
        step=step,
        position="{}",
        data_fingerprint="",
        batch=(),
        seed=0,
        plan="none",
        versions={},
        fingerprints=fingerprints(state),
        leaves=described_leaves(state),
    )


def test_spd_932_a_restored_state_is_donated_in_its_first_step(tmp_path, recwarn):
    """A resumed run ran out of memory where a fresh one fitted: what was restored could not be donated."""
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    state = {"w": jax.device_put(jnp.arange(WIDTH * 64.0), here), "step": jax.device_put(jnp.int32(3), here)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state, record(3, state), held_out_loss=None)
    checkpoints.wait()
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), state)
    restored = checkpoints.restore(like)
    checkpoints.close()
    before = buffer_addresses(restored.state)
    step = jax.jit(lambda state, _: (jax.tree.map(lambda leaf: leaf + 1, state), {}), donate_argnums=0)
    after, _ = checks_donation(step)(restored.state, None)
    assert reused_share(before, buffer_addresses(after)) >= 0.95
    assert not [warning for warning in recwarn if issubclass(warning.category, TrainWarning)]


def test_spd_971_a_state_that_is_held_twice_is_warned_of():
    """Donation that fails is silent: the loop says it."""
    state = {"w": jnp.arange(WIDTH * 64.0)}
    keeps_both = jax.jit(lambda state, _: (jax.tree.map(lambda leaf: leaf + 1, state), {}))
    with pytest.warns(TrainWarning, match="reused 0 % of the state's memory: the state is held twice"):
        checks_donation(keeps_both)(state, None)
