"""Targets as data: what texts mean, what rows may say, what a target runs, and every way to ask wrongly."""

import dataclasses
import math
import re

import pytest

from remat_kit.errors import TargetError
from remat_kit.targets import abilities, availability, check_abilities, load_rows, parse_target

ROWS = load_rows()
GPUS = [kind for kind, row in ROWS.items() if row.platform == "cuda"]
TPUS = [kind for kind, row in ROWS.items() if row.platform == "tpu"]

LAYOUTS = [
    # text, kind, topology, hosts, devices
    ("h100", "h100", (), 1, 1),
    ("h100:8", "h100", (8,), 1, 8),
    ("h100:2x8", "h100", (2, 8), 2, 16),
    ("H100:8", "h100", (8,), 1, 8),
    ("a100-80:4", "a100-80", (4,), 1, 4),
    ("v5e", "v5e", (), 1, 1),
    ("v5e:1x1", "v5e", (1, 1), 1, 1),
    ("v5e:2x2", "v5e", (2, 2), 1, 4),
    ("v5e:2x4", "v5e", (2, 4), 2, 8),
    ("v5p:2x2x4", "v5p", (2, 2, 4), 4, 16),
    ("v5p:2x2x3", "v5p", (2, 2, 3), 3, 12),
    ("v5p:4x4x8", "v5p", (4, 4, 8), 32, 128),
    ("tpu7x", "tpu7x", (), 1, 1),
    ("7x:2x2x1", "tpu7x", (2, 2, 1), 1, 8),
    ("v7x:2x2x1", "tpu7x", (2, 2, 1), 1, 8),
    ("cpu", "cpu", (), 1, 1),
    ("cpu:8", "cpu", (8,), 1, 8),
    ("attached", "attached", (), 1, 1),
]

WRONG = [
    ("h1000", "unknown target 'h1000'.* Did you mean 'h100'"),
    ("a100", "Did you mean 'a100-80' or 'a100-40'"),
    ("", "unknown target ''.* Known: cpu, h100"),
    ("h100:0", "'h100:0' has no devices.*at least 1.*h100:8"),
    ("h100:2x0", "has no devices"),
    ("h100:", "'' is not a topology"),
    ("h100:-1", "'-1' is not a topology"),
    ("h100:8x", "'8x' is not a topology"),
    ("h100:eight", "'eight' is not a topology.*h100:2x8"),
    ("h100:1x2x8", "too many numbers.*h100:2x8"),
    ("cpu:2x4", "too many numbers.*cpu:8"),
    ("v5e:2x2x1", "a topology of v5e has 2 numbers.*v5e:2x2"),
    ("v5e:4", "a topology of v5e has 2 numbers"),
    ("v5p:2x2", "a topology of v5p has 3 numbers.*v5p:2x2x1"),
    ("v5e:3x3", "no such slice.*even"),
    ("v5e:1x2", "no such slice.*all are 1"),
    ("v5p:1x1x2", "no such slice"),
    ("v5e:16x32", "has 512 chips; a slice of v5e has at most 256"),
    ("attached:2", "takes no topology. Write 'attached'"),
]


@pytest.mark.parametrize(("text", "kind", "topology", "num_hosts", "num_devices"), LAYOUTS)
def test_texts_mean(text, kind, topology, num_hosts, num_devices):
    target = parse_target(text, ROWS)
    assert (target.text, target.kind, target.topology) == (text, kind, topology)
    assert (target.num_hosts, target.num_devices) == (num_hosts, num_devices)
    hash(target)


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_wrong_texts_say_what_is_allowed(text, words):
    with pytest.raises(TargetError, match=words):
        parse_target(text, ROWS)


def test_the_issue_s_rows_are_there():
    assert set(GPUS) == {"h100", "h200", "b200", "a100-80", "a100-40", "a6000", "rtx6000pro", "v100", "rtx4090", "rtx3090", "l4"}
    assert set(TPUS) == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    h100, v5e = parse_target("h100", ROWS), parse_target("v5e", ROWS)
    assert (h100.memory_bytes, h100.flops_per_s, h100.host_bytes_per_s) == (84_942_979_072, 989e12, 64e9)
    assert (v5e.memory_bytes, v5e.flops_per_s, v5e.host_bytes_per_s) == (16126 * 2**20, 197e12, None)


@pytest.mark.parametrize("kind", [*GPUS, *TPUS])
def test_rows_are_plausible_and_sourced(kind):
    row = ROWS[kind]
    assert row.memory_bytes is not None and 8 * 2**30 < row.memory_bytes < 2**38
    assert row.flops_per_s is not None and 5e13 < row.flops_per_s < 5e15
    assert row.memory_bytes_per_s is not None and 2e11 < row.memory_bytes_per_s < 1e13
    assert len(row.source) > 20 and "float32" in row.dtypes


@pytest.mark.parametrize("kind", GPUS)
def test_bfloat16_and_flash_attention_need_compute_capability_8(kind):
    target = parse_target(kind, ROWS)
    assert target.gpu is not None
    is_new = target.gpu.compute_capability >= (8, 0)
    for use in ({"dtypes": ["bfloat16"], "kernels": []}, {"dtypes": ["float16"], "kernels": ["cudnn_attention"]}):
        if is_new:
            check_abilities(target, **use)
        else:
            with pytest.raises(TargetError, match="v100"):
                check_abilities(target, **use)


def test_what_a_target_lacks_is_named_with_what_it_has():
    v100, v5e, cpu = (parse_target(kind, ROWS) for kind in ("v100", "v5e", "cpu"))
    with pytest.raises(TargetError, match="multiplies bfloat16, which v100 has no units for; it has float64, float32, float16"):
        check_abilities(v100, dtypes=("float32", "bfloat16"), kernels=())
    with pytest.raises(TargetError, match=r"cudnn_attention, which does not run on v5e: .*8.0 or newer. Choose .* XLA"):
        check_abilities(v5e, dtypes=(), kernels=("cudnn_attention",))
    with pytest.raises(TargetError, match=r"splash_attention, which does not run on cpu: .*needs a TPU"):
        check_abilities(cpu, dtypes=(), kernels=("splash_attention",))
    check_abilities(v5e, dtypes=("bfloat16", "float32", "int8"), kernels=("splash_attention", "somebody_s_kernel"))
    check_abilities(parse_target("attached", ROWS), dtypes=("bfloat16",), kernels=("cudnn_attention",))


def load(tmp_path, text):
    path = tmp_path / "targets.toml"
    path.write_text(text)
    return load_rows(path)


def test_a_user_s_row_on_top_of_ours(tmp_path):
    rows = load(
        tmp_path,
        """
        [h100-94]
        base = "h100"
        memory_bytes = 100_000_000_000
        source = "the box in the corner"
        compiler_options = { xla_gpu_autotune_level = 0, xla_gpu_enable_latency_hiding_scheduler = true }
        [half]
        base = "h100-94"
        flops_per_s = 1e14
        """,
    )
    ours, more, half = (parse_target(f"{kind}:2", rows) for kind in ("h100", "h100-94", "half"))
    differing = {field.name for field in dataclasses.fields(ours) if getattr(ours, field.name) != getattr(more, field.name)}
    assert differing == {"kind", "text", "memory_bytes", "source", "compiler_options"}
    assert dict(more.compiler_options) == {"xla_gpu_autotune_level": 0, "xla_gpu_enable_latency_hiding_scheduler": True}
    assert (half.memory_bytes, half.flops_per_s) == (100_000_000_000, 1e14)
    assert list(rows)[: len(ROWS)] == list(ROWS)


def test_a_user_s_row_may_replace_ours_and_stand_alone(tmp_path):
    box = '[box]\nplatform = "cpu"\ndevice_kind = "box"\ndtypes = []\nsource = "me"'
    rows = load(tmp_path, f'[h100]\nbase = "h100"\nmemory_bytes = 1\n{box}')
    assert parse_target("h100", rows).memory_bytes == 1
    assert parse_target("box:2", rows).num_devices == 2
    assert ROWS["h100"].memory_bytes == 84_942_979_072


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[a]\nbase = "h10"', r"\[a\]: base = 'h10' is no target.* Did you mean 'h100'"),
        ('[a]\nbase = "h100"\nmemory_byte = 3', "unknown key 'memory_byte'. Did you mean 'memory_bytes'"),
        ('[a]\nbase = "h100"\nmemory_bytes = "80GB"', "Expected `int | null`, got `str` - at `.*memory_bytes"),
        ('[a]\nbase = "h100"\nmemory_bytes = 0', "memory_bytes = 0 must be above 0"),
        ('[a]\nbase = "h100"\nclock_ghz = -1.0', "clock_ghz = -1.0 must be above 0"),
        ('[a]\nbase = "h100"\ncompiler_options = ["x"]', "compiler_options must be a table"),
        ('[a]\nbase = "h100"\ntopology_rank = 2', "unknown key 'topology_rank'"),
        ('[a]\nplatform = "cuda"\ndevice_kind = "x"\ndtypes = []\nsource = "me"', "missing required field `compute_capability`"),
        ('[a]\nplatform = "gpu"', "platform = 'gpu'; allowed are cpu, cuda and tpu"),
        ("[a]\nmemory_bytes = 3", r"platform = None; allowed .*base ="),
        ("a = 3", "is not a table"),
        ('[attached]\nbase = "h100"', "not 'attached'"),
        ('["My Box"]\nbase = "h100"', "small letters"),
        ("[a", "is not TOML"),
    ],
)
def test_wrong_rows_name_the_key(tmp_path, text, words):
    with pytest.raises(TargetError, match=words) as caught:
        load(tmp_path, text)
    assert re.search(r"targets\.toml", str(caught.value))


def test_a_targets_file_that_is_not_there(tmp_path):
    with pytest.raises(TargetError, match=r"can't read the targets in .*nothing.toml: No such file"):
        load_rows(tmp_path / "nothing.toml")


def test_what_is_missing_comes_with_its_install_command(monkeypatch):
    monkeypatch.setattr(abilities, "_has", lambda _module: False)
    monkeypatch.setattr(abilities.shutil, "which", lambda _name: None)
    monkeypatch.setattr(abilities.machine, "system", lambda: "Linux")
    monkeypatch.setattr(abilities.machine, "machine", lambda: "x86_64")
    assert availability("cpu").is_available and availability("attached").is_available
    assert availability("tpu").remedy == "libtpu missing: pip install 'remat-kit[tpu]'"
    assert availability("cuda").remedy == "jax_cuda12_plugin and ptxas missing: pip install 'remat-kit[gpu]'"
    assert availability("cuda", kernels=["cudnn_attention"]).remedy.endswith("cuDNN missing: pip install 'remat-kit[gpu-cudnn]'")
    monkeypatch.setattr(abilities.machine, "machine", lambda: "aarch64")
    assert "not to be had on Linux aarch64" in availability("tpu").remedy


@pytest.mark.parametrize("text", [text for text, *_ in LAYOUTS if ":" in text and "v5p" in text])
def test_every_chip_of_a_slice_is_a_device(text):
    target = parse_target(text, ROWS)
    assert target.num_devices == math.prod(target.topology)
