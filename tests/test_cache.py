"""The disk cache: what is the same question, what is another one, and files that others write or break."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from remat_kit.compile.cache import Cache, cache_key, canonical_program, default_folder, load, store
from remat_kit.compile.compiler import compile_lowered
from remat_kit.compile.environment import compiler_flags
from remat_kit.compile.topology import devices_for
from remat_kit.records import CompiledStep, MemoryBytes
from remat_kit.targets import load_rows, parse_target

CPU = parse_target("cpu", load_rows())
KEY = "0" * 64
MEMORY = MemoryBytes(argument_bytes=1, output_bytes=2, alias_bytes=3, temp_bytes=4)
STEP = CompiledStep(
    device=MEMORY, host=None, refused="no room", num_xla_remat=5, compile_s=1.5, versions=(("jax", "1"),), notes=("a note",)
)


def test_what_is_stored_comes_back_marked(tmp_path):
    cache = Cache(tmp_path / "made" / "when needed")
    assert load(cache, KEY) is None
    store(cache, KEY, STEP)
    assert load(cache, KEY) == dataclasses.replace(STEP, from_cache=True)
    with_host = dataclasses.replace(STEP, host=MEMORY, refused=None)
    store(cache, KEY, with_host)
    assert load(cache, KEY) == dataclasses.replace(with_host, from_cache=True)
    assert load(cache, "1" * 64) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"schema":1', '"schema":0'),
        lambda text: text.replace("temp_bytes", "tmp_bytes"),
        lambda text: text.replace('"compile_s":1.5', '"compile_s":"long"'),
        lambda text: text.replace(KEY, "2" * 64),
        lambda text: "\x00\xff",
        lambda text: "[]",
    ],
)
def test_a_damaged_file_is_a_miss(tmp_path, damage):
    cache = Cache(tmp_path)
    store(cache, KEY, STEP)
    (path,) = tmp_path.rglob("*.json")
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text), encoding="latin-1")
    assert load(cache, KEY) is None


WRITER = """
import dataclasses, sys
from pathlib import Path
from remat_kit.compile.cache import Cache, load, store
key, number = "0" * 64, sys.argv[2]
step = dataclasses.replace(load(Cache(Path(sys.argv[1])), key), notes=(number * 100_000,))
for _ in range(50):
    store(Cache(Path(sys.argv[1])), key, step)
"""


def test_two_processes_may_write_while_a_third_reads(tmp_path):
    store(Cache(tmp_path), KEY, STEP)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, number], env=child_environment()) for number in "12"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        found = load(Cache(tmp_path), KEY)
        assert found is not None
        assert found.notes[0] in ("a note", "1" * 100_000, "2" * 100_000)
        seen.add(found.notes[0][0])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(seen) > 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{KEY}.json"]


def child_environment(**variables):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def test_where_the_cache_is(tmp_path):
    assert default_folder({"REMAT_KIT_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert default_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "remat-kit"
    assert str(default_folder({})).endswith("/.cache/remat-kit")


PROGRAM = """
 %0 = stablehlo.custom_call @CustomSPMDPartitioning(%a) {backend_config = "94023", mhlo.sharding = "{}"} : tensor<f32>
 %1 = stablehlo.custom_call @CustomSPMDPartitioning(%0) {backend_config = "94777"} : tensor<f32>
 %2 = stablehlo.custom_call @other(%1) {backend_config = "94023"} : tensor<f32>
 %3 = stablehlo.constant dense<"0x00ff00ff00ff"> : tensor<6xi8>
#loc1 = loc("/home/me/proj/train.py":3:4 to :9)
#loc2 = loc("<lambda> at 0x7f00aa00bb00"(#loc1))
"""


def test_what_differs_between_processes_is_masked_and_nothing_else():
    other = PROGRAM.replace('"94023", mhlo', '"1111", mhlo').replace("94777", "2222").replace("7f00aa00bb00", "7f11")
    other = other.replace("7f11", "7f1111111111").replace("/home/me/proj", "/tmp/clone")
    mine, theirs = canonical_program(PROGRAM, ["/home/me/proj"]), canonical_program(other, ["/tmp/clone"])
    assert mine == theirs
    assert 'loc("train.py":3:4' in mine
    assert "callback 0" in mine and "callback 1" in mine
    for piece in ('@other(%1) {backend_config = "94023"}', 'dense<"0x00ff00ff00ff">'):
        assert piece in mine
    for changed in (("00ff00ff00ff", "00ff00ff00fe"), (":3:4", ":4:4"), ("%0) {", "%a) {")):
        assert canonical_program(PROGRAM.replace(*changed), ["/home/me/proj"]) != mine
    one_callback = PROGRAM.replace("94777", "94023")
    assert canonical_program(one_callback, ["/home/me/proj"]) != mine


def test_the_order_of_named_parts_does_not_count():
    assert cache_key("p", {"a": 1, "b": 2}) == cache_key("p", {"b": 2, "a": 1}) != cache_key("p", {"a": 2, "b": 1})
    assert cache_key("p", {}) != cache_key("q", {})


@functools.cache  # the key holds the lines of the callers, so tests lower once
def lowered(scale=2.0):
    return jax.jit(lambda x: jnp.sin(x @ x) * scale).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))


def test_the_same_question_is_compiled_once(tmp_path):
    first = compile_lowered(lowered(), target=CPU, cache=Cache(tmp_path))
    second = compile_lowered(lowered(), target=CPU, cache=Cache(tmp_path))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert dataclasses.replace(second, from_cache=False) == first
    assert not compile_lowered(lowered(), target=CPU, cache=None).from_cache


def test_every_part_of_the_question_counts(tmp_path, monkeypatch):
    cache = Cache(tmp_path)

    def is_new(*, program=None, target=CPU, options=()):
        return not compile_lowered(program or lowered(), target=target, xla_options=options, cache=cache).from_cache

    assert is_new() and not is_new()
    assert is_new(program=lowered(scale=3.0))
    assert is_new(options=(("xla_cpu_enable_fast_math", "true"),))
    assert not is_new(options=(("xla_cpu_enable_fast_math", True),))
    assert is_new(target=dataclasses.replace(CPU, device_kind="another"))
    assert not is_new(target=dataclasses.replace(CPU, flops_per_s=1e12, text="CPU", source="elsewhere"))
    with jax.log_compiles(False), jax.threefry_partitionable(not jax.config.values["jax_threefry_partitionable"]):
        assert is_new()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=1")
    assert is_new()
    monkeypatch.undo()
    monkeypatch.setattr("remat_kit.compile.compiler._versions", lambda _platform: iter([("jax", "999")]))
    assert is_new() and not is_new()


def test_a_jitted_step_s_own_compiler_options_count(tmp_path):
    def program(**options):
        return jax.jit(jnp.sin, compiler_options=options).lower(jax.ShapeDtypeStruct((8,), jnp.float32))

    assert not compile_lowered(program(), target=CPU, cache=Cache(tmp_path)).from_cache
    assert not compile_lowered(program(xla_cpu_enable_fast_math=True), target=CPU, cache=Cache(tmp_path)).from_cache


def test_the_order_of_devices_counts(tmp_path):
    target = parse_target("cpu:4", load_rows())
    devices = devices_for(target)

    @functools.cache
    def lower_for(ordered):
        mesh = jax.sharding.Mesh(ordered, ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        return jax.jit(lambda x: x.sum()).lower(jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharding))

    orders = [devices, devices, devices[::-1], devices[::-1]]
    found = [compile_lowered(lower_for(order), target=target, cache=Cache(tmp_path)).from_cache for order in orders]
    assert found == [False, True, False, True]


def test_the_number_of_cpu_devices_is_the_target_s_not_a_flag():
    flags = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2", "LIBTPU_INIT_ARGS": ""}
    assert compiler_flags(flags) == (("XLA_FLAGS", "--xla_a=1 --xla_b=2"),)


def test_a_file_in_the_folder_s_place_costs_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    step = compile_lowered(lowered(), target=CPU, cache=Cache(tmp_path / "file"))
    assert "not cached" in step.notes[-1]


CHILD = """
import json, sys
from pathlib import Path
from remat_kit.compile.environment import prepare_environment
prepare_environment()
import jax, jax.numpy as jnp
from remat_kit.compile.cache import Cache
from remat_kit.compile.compiler import compile_lowered
from remat_kit.compile.topology import devices_for
from remat_kit.targets import load_rows, parse_target

target = parse_target(sys.argv[2], load_rows())
mesh = jax.sharding.Mesh(devices_for(target), ("x",))
def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))

def loss(x, w):
    q = (x @ w).reshape(*x.shape[:2], 2, 64)
    y = jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation=sys.argv[3] if sys.argv[3] != "none" else None)
    return jnp.sum(jax.checkpoint(jnp.sin)(y).astype(jnp.float32))

lowered = jax.jit(jax.grad(loss)).lower(abstract(8, 128, 128), abstract(128, 128))
compiled = compile_lowered(lowered, target=target, cache=Cache(Path(sys.argv[1])))
print(json.dumps(compiled.from_cache))
"""


def run_child(folder, cache, *, seed, target, attention):
    folder.mkdir()
    (folder / "child.py").write_text(textwrap.dedent(CHILD))
    environment = child_environment(PYTHONHASHSEED=str(seed))
    command = [sys.executable, "child.py", str(cache), target, attention]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def test_a_fresh_process_in_another_folder_compiles_nothing(tmp_path):
    for number, is_cached in ((1, False), (2, True)):
        found = run_child(tmp_path / f"clone{number}", tmp_path / "cache", seed=number, target="cpu:8", attention="none")
        assert found is is_cached


@pytest.mark.slow
def test_cudnn_attention_on_eight_gpus_is_compiled_once(tmp_path):
    pytest.importorskip("jax_cuda12_plugin", reason="needs remat-kit[gpu-cudnn]")
    pytest.importorskip("nvidia.cudnn", reason="needs remat-kit[gpu-cudnn]")
    for number, is_cached in ((1, False), (2, True)):
        found = run_child(tmp_path / f"clone{number}", tmp_path / "cache", seed=number, target="h100:8", attention="cudnn")
        assert found is is_cached
