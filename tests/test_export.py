"""A policy through our code lowers to the same program as the plain JAX that it is exported as; what can't be said is refused."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remat_kit import PolicyError, parse_policy, remat
from remat_kit.apply.lowering import lower_policy
from remat_kit.export import export_policy, policy_text

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
W = jnp.ones((8, 8)) / 8


def block(x, w):
    q = checkpoint_name(jnp.sin(x @ w), "q")
    k = checkpoint_name(jnp.sin(q @ w), "k")
    return jnp.sin(jnp.einsum("bd,cd->bc", q, k) @ k)


def program(wrapped):
    """StableHLO of the gradient, without locations and without what functions are called."""
    text = jax.jit(jax.grad(lambda x, w: jnp.sum(wrapped(x, w)), argnums=(0, 1))).lower(X, W).as_text()
    return re.sub(r"@[\w.]+", "@", text)


EXPRESSIBLE = [
    "none",
    "full",
    "save(q)",
    "save(q,k)",
    "save(q,k)+recompute(k)",
    "offload(q)",
    "save(q)+offload(k)",
    "dots",
    "dots_no_batch",
    "dots_no_batch+save(q)",
]


@pytest.mark.parametrize("policy", EXPRESSIBLE)
def test_same_program_as_plain_jax(policy):
    plain = eval(export_policy(policy, "jax"), {"jax": jax, "block": block})  # noqa: S307 (our own text)
    assert program(remat(block, policy)) == program(plain)
    if policy not in ("none", "dots"):
        assert program(plain) != program(block)


@pytest.mark.parametrize("policy", ["full", "save(q)", "dots_no_batch"])
def test_same_program_as_plain_linen(policy):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sin(checkpoint_name(jnp.sin(nn.Dense(8, name="up")(x)), "q") @ x.T)

    params = Block().init(jax.random.key(0), X)

    def text(module_class):
        lowered = jax.jit(jax.grad(lambda params: jnp.sum(module_class().apply(params, X)))).lower(params)
        return re.sub(r"@[\w.]+", "@", lowered.as_text())

    plain = nn.remat(Block, policy=lower_policy(parse_policy(policy)))
    by_hand = nn.remat(Block, policy=eval(_jax_policy(policy), {"jax": jax}))  # noqa: S307
    assert text(remat(Block, policy)) == text(plain) == text(by_hand) != text(Block)


def _jax_policy(policy):
    found = re.search(r"policy=(.*)\)$", export_policy(policy, "jax"))
    return found[1] if found else "None"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("save(q*)", "write the names"),
        ("weights", "JAX has no such policy"),
        ("kernels+save(q)", "JAX has no such policy"),
        ("smaller(1MiB)", "JAX has no such policy"),
        ("offload(q)+dots", "can't join offloading"),
        ("full*2 | none*2", "different policies"),
        ("ful", "Did you mean"),
    ],
)
def test_what_jax_cannot_say(policy, message):
    with pytest.raises(PolicyError, match=message):
        export_policy(policy, "jax")


def test_maxtext_settings():
    assert export_policy("minimal_offloaded", "maxtext").splitlines() == [
        "remat_policy: custom",
        "query_proj: offload",
        "key_proj: offload",
        "value_proj: offload",
        "out_proj: offload",
        "mlpwi: offload",
        "mlpwi_0: offload",
        "mlpwi_1: offload",
        "mlpwo: offload",
    ]
    assert export_policy("full", "maxtext") == "remat_policy: full"
    with pytest.raises(PolicyError, match="is no role"):
        export_policy("save(q)", "maxtext")
    with pytest.raises(PolicyError, match="can't recompute layer_input"):
        export_policy("recompute(layer_input)", "maxtext")


def test_policy_from_a_file(tmp_path):
    file = tmp_path / "policy.txt"
    file.write_text("save(q,\n  k)\n")
    assert policy_text(f"@{file}") == "save(q, k)"
    with pytest.raises(PolicyError, match="can't read a policy"):
        policy_text("@nosuch.txt")
