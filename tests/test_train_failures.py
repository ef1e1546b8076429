"""What a person reads when a run can't start or go on: too little memory, options that are none, folders that can't be made."""

import contextlib
import itertools
import resource

import jax
import jax.numpy as jnp
import pytest

from remat_kit import Stack, Step
from tests.train_runs import changed, run
from train.build import Built, build_steps
from train.errors import CheckpointError, ConfigError, TooLargeError
from train.failures import explained
from train.folder import choose_folder
from train.loop import Hooks, Intervals, run_loop


def huge(policies, devices, *, batch: int = 4, seq: int = 16, mesh: str = "", log_elements: int = 47):
    """A step that sorts more numbers than any machine holds."""
    del policies, mesh
    here = jax.sharding.SingleDeviceSharding(devices[0])

    def fn(state, batch):
        rows = jax.lax.sort(jax.lax.broadcasted_iota(jnp.float32, (2 ** (log_elements - 20), 2**20), 0) * state, dimension=1)
        return state + rows[-1, -1], {"loss": jnp.mean(batch["weights"])}

    types = {"tokens": "int32", "labels": "int32", "weights": "float32"}
    spec = {name: jax.ShapeDtypeStruct((batch, seq), dtype, sharding=here) for name, dtype in types.items()}
    state = jax.ShapeDtypeStruct((), "float32", sharding=here)
    stacks = (Stack(name="layers", num_layers=1),)
    return Step(fn=fn, args=(state, spec), donate=(0,), stacks=stacks, init=lambda key: (jnp.float32(1), None))


def test_a_step_that_does_not_fit_is_told_how_to_plan(tmp_path):
    model = {"model": "tests.test_train_failures:huge", "policy": None, "dtype": "auto"}
    with pytest.raises(TooLargeError) as caught:
        run(tmp_path, model=model, run={"steps": 3})
    message = str(caught.value)
    assert message.startswith("the step does not fit into the memory: ")
    asked = "remat-kit plan tests.test_train_failures:huge --set batch=4 --set seq=16 --set mesh= --out plan.toml"
    assert asked in message
    assert "--xla xla_backend_optimization_level=0 --target TARGET" in message


def test_a_compiler_option_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--xla nope=1: No such compile option: 'nope'"):
        run(tmp_path, model={"policy": "none"}, run={"xla": ("nope=1",)})


def test_other_errors_of_jax_pass_as_they_are():
    built: Built = build_steps(changed(), jax.devices("cpu")[:1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: something else"), explained(built):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--dir .*file/run: it can't be made: Not a directory"):
        choose_folder(changed(run={"dir": str(tmp_path / "file" / "run")}), None)


def test_resuming_goes_on_where_it_was():
    with pytest.raises(ConfigError, match="--resume a goes on in that folder, not in --dir b: give one of them"):
        choose_folder(changed(run={"dir": "b"}), "a")


@contextlib.contextmanager
def largest_file(num_bytes):
    """Nobody writes a larger file inside, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves its other writes as they are
def test_a_checkpoint_that_can_not_be_written_is_told(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"a checkpoint can't be written: File too large\..* --resume "),
        largest_file(50_000),
    ):
        run(tmp_path)
    assert not list((tmp_path / "checkpoints").glob("step_[0-9]*[0-9]")), "what was not written whole is not there"


def test_a_run_that_is_stopped_shows_and_saves_its_own_last_step():
    """Its summary would else call the loss of an earlier step the last one."""
    shown, saved = {}, []
    hooks = Hooks(
        step=jax.jit(lambda state, batch: (state + batch, {"loss": state + batch})),
        evaluate=lambda state, step: float(state),
        save=lambda state, step, loss: saved.append((step, float(state), loss)),
        show=lambda step, numbers, step_time_s: shown.update({step: numbers["loss"]}),
        explain=lambda step, numbers, before, state: "",
        beat=lambda step: None,
        should_stop=lambda step: step == 7,
    )
    intervals = Intervals(steps=20, log=5, evaluate=0, checkpoint=6)
    end = run_loop(jnp.float32(0), itertools.repeat(jnp.float32(1)), first_step=0, intervals=intervals, hooks=hooks)
    assert (end.step, end.was_stopped) == (7, True)
    assert shown == {5: 5.0, 7: 7.0}
    assert saved == [(6, 6.0, None), (7, 7.0, None)]
