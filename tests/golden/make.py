"""Makes the golden compiled steps again: `PYTHONPATH=. python tests/golden/make.py [target …]`, one process per target.

A golden step is what a compile of `transformer_step` dumps (HLO, buffer assignment, live ranges), with the compiler's own totals,
the versions, the sizes that its FLOPs follow from, and the residuals that the trace found. It is compiled for absent devices;
nothing runs.
"""

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).parent
TARGETS = ("cpu", "h100", "v5e:1x1", "h100:8", "v5p:2x2x1")
SIZES = {"layers": 12, "batch": 64, "seq": 256, "model": 512, "heads": 4, "ff": 1536, "vocab": 5120}
SAVED = ("query", "key", "value", "mlp_up")


def transformer_step(devices, *, saved):
    """A step of a scanned transformer: named values, f32 weights, bf16 activations, AdamW; batch and weights over the devices.

    Args:
        devices: Of the target.
        saved: Names that the policy saves; everything else is recomputed.

    Returns:
        The function, its arguments and their positions to donate.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.ad_checkpoint import checkpoint_name as named
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    n = SimpleNamespace(**SIZES)
    mesh = Mesh(np.array(devices), ("data",))

    def over(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes)) if len(devices) > 1 else SingleDeviceSharding(devices[0])

    def split(x):
        return jax.lax.with_sharding_constraint(x, over("data")) if len(devices) > 1 else x

    def norm(x, gain):
        return (x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)

    def heads(x, w, name):
        y = (x @ w.astype(x.dtype)).reshape(*x.shape[:2], n.heads, n.model // n.heads)
        return named(y, name)

    def block(x, w):
        h = norm(split(x), w["norm1"])
        with jax.named_scope("attention"):
            q, k, v = heads(h, w["q"], "query"), heads(h, w["k"], "key"), heads(h, w["v"], "value")
            scores = jnp.einsum("bshd,bthd->bhst", q, k) * (n.model // n.heads) ** -0.5
            scores = jnp.where(jnp.tril(jnp.ones((n.seq, n.seq), bool)), scores, -1e9)
            attended = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype), v)
            x = x + named(attended.reshape(x.shape) @ w["o"].astype(x.dtype), "attn_out")
        h = norm(x, w["norm2"])
        with jax.named_scope("mlp"):
            up = named(h @ w["up"].astype(x.dtype), "mlp_up")
            return split(x + jax.nn.gelu(up) @ w["down"].astype(x.dtype))

    remat = jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(*saved), prevent_cse=False)

    def loss(params, tokens):
        x = split(params["embedding"].astype(jnp.bfloat16)[tokens])
        x, _ = jax.lax.scan(lambda x, w: (remat(x, w), None), x, params["layers"])
        with jax.named_scope("head"):
            logits = split((x @ params["head"].astype(x.dtype)).astype(jnp.float32))
            right = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
            return (jax.nn.logsumexp(logits, -1) - right).mean()

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch["tokens"])
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["nu"], grads)
        params = jax.tree.map(lambda p, m, v: p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu}, value

    def array(*shape, axes=()):
        return jax.ShapeDtypeStruct(shape, "float32", sharding=over(*axes))

    square, depth = (n.layers, n.model, n.model), n.layers
    layers = {name: array(*square, axes=(None, "data")) for name in "qkvo"} | {
        "norm1": array(depth, n.model),
        "norm2": array(depth, n.model),
        "up": array(depth, n.model, n.ff, axes=(None, "data")),
        "down": array(depth, n.ff, n.model, axes=(None, "data")),
    }
    params = {
        "embedding": array(n.vocab, n.model, axes=("data",)),
        "head": array(n.model, n.vocab, axes=("data",)),
        "layers": layers,
    }
    tokens = jax.ShapeDtypeStruct((n.batch, n.seq), "int32", sharding=over("data"))
    state = {"params": params, "mu": params, "nu": params}
    out = (jax.tree.map(lambda leaf: leaf.sharding, state), over())
    return jax.jit(step, donate_argnums=0, out_shardings=out), (state, {"tokens": tokens})


def make(text):
    """Compiles the step for one target and writes its archive."""
    import jax

    from remat_kit.compile.compiler import _versions
    from remat_kit.compile.environment import prepare_environment
    from remat_kit.compile.topology import devices_for
    from remat_kit.targets import load_rows, parse_target
    from remat_kit.trace.residuals import report_graph
    from remat_kit.trace.step import graph_of

    prepare_environment()
    target = parse_target(text, load_rows())
    step, args = transformer_step(devices_for(target), saved=SAVED)
    traced = step.trace(*args)
    residuals = report_graph(graph_of(traced, args)).residuals
    with tempfile.TemporaryDirectory() as folder:
        options = dict(target.compiler_options) | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        totals = traced.lower().compile(compiler_options=options).memory_analysis()
        platform = {"cuda": "cuda", "tpu": "tpu"}.get(target.platform, "cpu")
        facts = {
            "target": text,
            "versions": dict(_versions(platform)),
            "sizes": SIZES | {"devices": target.num_devices},
            "saved": SAVED,
            "totals": {key: getattr(totals, key) for key in dir(totals) if key.endswith("_in_bytes")},
            "residuals": [dataclasses.asdict(each) for each in residuals],
        }
        path = FOLDER / f"{text.replace(':', '_')}-jax{jax.__version__}.tar.xz"
        _write(path, Path(folder), facts)
    sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")


def _write(path, folder, facts):
    """Packs the three dumps and the facts, without the folders of this machine."""
    assignment = max(folder.glob("*after_optimizations-buffer-assignment.txt"), key=lambda each: each.stat().st_size)
    stem = assignment.name.removesuffix("-buffer-assignment.txt")
    root = f"{FOLDER.parents[1]}/"
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for name in (f"{stem}.txt", assignment.name, f"{stem}-live-range.txt"):
            short = name.removeprefix(stem.removesuffix("after_optimizations"))
            _add(archive, short, (folder / name).read_text().replace(root, ""))
        _add(archive, "facts.json", json.dumps(facts, indent=1).replace(root, ""))


def _add(archive, name, text):
    data = text.encode()
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        make(sys.argv[1])
    else:
        for each in sys.argv[1:] or TARGETS:
            subprocess.run([sys.executable, __file__, each], check=True)
