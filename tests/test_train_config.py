"""The command line and the files of a run: presets, what stands over what, and every error with its near miss."""

import json

import pytest

from remat_kit import PolicyError, StepError
from tests.train_runs import QUICK, changed
from train.build import build_steps, factory_name
from train.cli import read_arguments
from train.config import TrainConfig, check, from_mapping, to_mapping, warmup_steps
from train.errors import CheckpointError, ConfigError
from train.folder import choose_folder, store_config
from train.presets import PRESETS


def test_a_model_brings_its_preset_and_arguments_stand_over_it():
    config = read_arguments(["--model", "gpt2_small", "--batch", "4"]).config
    assert (config.model.batch, config.model.seq, config.optimizer.learning_rate) == (4, 1024, 6e-4)
    other = read_arguments(["--model", "llama3_tiny", "--preset", "gpt2_small"]).config
    assert (other.model.model, other.model.seq) == ("llama3_tiny", 1024)
    assert read_arguments([]).config == PRESETS["gpt2_tiny"]


def test_a_file_stands_over_the_preset_and_under_the_arguments(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nsteps = 70\nlog_every = 7\n[data]\nfiles = ["a", "b"]\n')
    config = read_arguments(["--config", str(path), "--steps", "80"]).config
    assert (config.run.steps, config.run.log_every, config.data.files) == (80, 7, ("a", "b"))
    assert config.model == PRESETS["gpt2_tiny"].model


def test_a_stored_configuration_comes_back_for_resuming_without_its_process(tmp_path):
    config = changed(QUICK, process={"coordinator": "h:1", "num_processes": 2, "process_id": 1})
    store_config(config, tmp_path)
    assert read_arguments(["--resume", str(tmp_path)]).config == QUICK
    assert read_arguments(["--resume", str(tmp_path), "--steps", "99"]).config == changed(QUICK, run={"steps": 99})


def test_another_policy_takes_the_place_of_the_stored_plan_file(tmp_path):
    store_config(changed(QUICK, model={"policy": None, "plan": "p.toml"}), tmp_path)
    model = read_arguments(["--resume", str(tmp_path), "--policy", "none"]).config.model
    assert (model.policy, model.plan) == ("none", None)


def test_configurations_are_json_and_back():
    assert from_mapping(json.loads(json.dumps(to_mapping(QUICK))), base=TrainConfig(), where="x") == QUICK


def test_an_unknown_flag_ends_with_2_and_the_near_miss(capsys):
    with pytest.raises(SystemExit) as caught:
        read_arguments(["--lerning-rate", "3"])
    assert caught.value.code == 2
    assert "--learning-rate" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstps = 3", "[run]: no key 'stps'; allowed are steps, "),
        ("[run]\nstps = 3", "Did you mean 'steps'?"),
        ("[rnu]\nsteps = 3", "no key 'rnu'; allowed are model, optimizer, data, run, process. Did you mean 'run'?"),
        ('[run]\nsteps = "many"', "[run]: Expected `int`, got `str`"),
        ("run = 3", "[run]: expected a table of keys, not 3."),
        ("[run", "can't be read as TOML"),
        ("[run]\nsteps = 0", "steps=0: it must be at least 1."),
    ],
)
def test_bad_files_are_errors(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_arguments(["--config", str(path)])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "full", "--plan", "p.toml"], "--policy 'full' and --plan 'p.toml' exclude each other"),
        (["--held-out", "1.5"], "held_out=1.5: it must lie between 0 and 1"),
        (["--steps", "50", "--warmup", "50"], "warmup=50 must be below steps=50: give --warmup 5 or --no-decay."),
        (["--preset", "gpt2_smal"], "no preset 'gpt2_smal'"),
        (["--preset", "gpt2_smal"], "Did you mean 'gpt2_small'?"),
        (["--config", "nowhere.toml"], "nowhere.toml: can't be read as TOML"),
    ],
)
def test_bad_arguments_are_errors(args, message):
    with pytest.raises(ConfigError) as caught:
        read_arguments(args)
    assert message in str(caught.value)


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run there \(config.json is missing\)"):
        read_arguments(["--resume", str(tmp_path)])


def test_a_new_run_never_writes_into_an_old_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = choose_folder(QUICK, None)
    assert [str(first), str(choose_folder(QUICK, None))] == ["runs/gpt2_tiny-1", "runs/gpt2_tiny-2"]
    (first / "checkpoints" / "step_4").mkdir()
    with pytest.raises(CheckpointError, match=f"go on with --resume {first}, or give another --dir"):
        choose_folder(changed(QUICK, run={"dir": str(first)}), None)


def test_the_warm_up_is_a_tenth_of_the_run_at_most_2000():
    assert [warmup_steps(changed(TrainConfig(), run={"steps": steps})) for steps in (50, 10**6)] == [5, 2000]
    assert warmup_steps(changed(TrainConfig(), optimizer={"warmup": 0})) == 0


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"model": "gpt2_tny"}, ConfigError, "Did you mean 'gpt2_tiny'?"),
        ({"model": "models:gpt9"}, StepError, "'models' has no 'gpt9'"),
        ({"set": ("layers",)}, ConfigError, "--set 'layers' is not NAME=VALUE."),
        ({"set": ("lyers=3",)}, StepError, "the step has no option 'lyers'"),
        ({"accumulate": 3}, StepError, "accumulate=3: a batch of 4 rows on 1 devices"),
        ({"policy": "save(qq)"}, PolicyError, "no value is named 'qq'"),
        ({"policy": "ful"}, PolicyError, "Did you mean 'full'?"),
        ({"policy": "@nowhere.txt"}, ConfigError, "--plan nowhere.txt: can't be read"),
        ({"policy": None, "plan": "nowhere.toml"}, PolicyError, "can't read a plan from 'nowhere.toml'"),
        ({"model": "tests.steps:mlp", "seq": None, "policy": None}, StepError, "a step that trains"),
    ],
)
def test_bad_models_are_errors(model, error, message):
    import jax

    with pytest.raises(error) as caught:
        build_steps(changed(QUICK, model=model), jax.devices("cpu")[:1])
    assert message in str(caught.value)


def test_the_step_that_trains_is_the_one_that_compare_is_told_to_compile():
    import shlex

    import jax
    from click.testing import CliRunner

    from remat_kit.cli import main

    built = build_steps(changed(QUICK, model={"accumulate": 2, "set": ("layers=3",)}), jax.devices("cpu")[:1])
    words = shlex.split(built.question.replace("TARGET", "cpu"))
    assert words[:3] == ["remat-kit", "compare", "models:gpt2_tiny"]
    found = CliRunner().invoke(main, [*words[1:], "--format", "json", "--no-cache"])
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["rows"]
    stats = jax.jit(built.step.fn, donate_argnums=0).lower(*built.step.args).compile(dict(built.xla)).memory_analysis()
    assert (row["argument_bytes"], row["temp_bytes"]) == (stats.argument_size_in_bytes, stats.temp_size_in_bytes)


def test_names_of_models_are_the_factories_and_modules_pass():
    assert factory_name("gpt2_small") == "models:gpt2_small"
    assert factory_name("own.module:step") == "own.module:step"
    with pytest.raises(ConfigError, match="there are gpt2_large"):
        factory_name("Decoder")


def test_a_text_file_is_a_plan_too(tmp_path):
    import jax

    path = tmp_path / "plan"
    path.write_text("full*1 | save(q)\n")
    built = build_steps(changed(QUICK, model={"policy": None, "plan": str(path)}), jax.devices("cpu")[:1])
    assert (str(built.plan), built.plan.source) == ("full*1 | save(q)", str(path))


def test_a_checked_configuration_is_returned():
    assert check(QUICK) is QUICK


def plan_file(path, *, program, target="h100", wraps=None):
    """A plan file as `remat-kit plan --out` writes it, for other numbers than ours."""
    proof = {"budget_bytes": 9, "compiled_total_bytes": 7, "flops": 1, "recompute_flops": 0, "full_compiles": 1, "compiles": 1}
    made = {"schema": "remat-kit/plan/1", "plan": "full*1 | save(q)*1", "step": "models:gpt2_tiny", "options": {}}
    text = json.dumps(made | {"target": target, "program": program, "versions": {}, "proof": proof, "wraps": wraps or {}})
    path.write_text(text)
    return str(path)


def test_a_plan_file_brings_its_plan_and_its_promise_and_is_held_against_the_step(tmp_path):
    import jax

    from remat_kit import RematWarning
    from remat_kit.trace import trace_graph
    from remat_kit.verbs.fingerprint import fingerprint_of

    devices = jax.devices("cpu")[:1]
    step = build_steps(QUICK, devices).plain
    right = plan_file(tmp_path / "right.json", program=fingerprint_of(step, trace_graph(step)))
    plan = build_steps(changed(QUICK, model={"policy": None, "plan": right}), devices).plan
    assert (str(plan), plan.source) == ("full*1 | save(q)*1", right)
    assert (plan.promise.target, plan.promise.device_kind, plan.promise.total_bytes) == ("h100", "NVIDIA H100 80GB HBM3", 7)
    wrong = plan_file(tmp_path / "wrong.json", program="0" * 16)
    with pytest.warns(RematWarning, match="wrong.json was planned for models:gpt2_tiny on h100: this step has other"):
        build_steps(changed(QUICK, model={"policy": f"@{wrong}"}), devices)
