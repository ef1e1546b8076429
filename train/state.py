"""What a loop must know of a state's memory and bits: that its buffers can be donated, that they were, and what bits it holds.

A restored array may not be donatable on a GPU, and a donation that fails is silent: the state is then held twice in the first
step (goodfire-ai/spd#932). So a restored state is copied by JAX before its first step, leaf by leaf, and after it the share of
reused buffers is measured.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

State = Any

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def rebuild(state: State) -> State:
    """The same state in buffers that JAX made, a leaf at a time: at most one leaf is there twice."""

    def own(leaf: jax.Array) -> jax.Array:
        made = jax.jit(jnp.copy, out_shardings=leaf.sharding)(leaf)
        made.block_until_ready()
        leaf.delete()
        return made

    return jax.tree.map(own, state)


def buffer_addresses(state: State) -> dict[int, int]:
    """Address -> bytes of every buffer of this process's devices."""
    shards = [shard.data for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    return {data.unsafe_buffer_pointer(): data.nbytes for data in shards}


def reused_share(before: dict[int, int], after: dict[int, int]) -> float:
    """Share of the bytes of `before` whose buffers `after` lies in."""
    total = sum(before.values())
    return sum(num_bytes for address, num_bytes in before.items() if address in after) / total if total else 1.0


def fingerprints(state: State) -> dict[str, int]:
    """A number for each leaf that changes when a bit does, or two values change places; the same on every mesh.

    Args:
        state: Arrays on the devices.

    Returns:
        Path of the leaf -> an unsigned 32-bit number.
    """
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    return {name: int(number) for name, number in jax.device_get(_hashes(leaves)).items()}


# One program for all: several at a time, each with collectives, can wait for each other forever between processes of a CPU.
@jax.jit
def _hashes(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _hash(leaf) for name, leaf in leaves.items()}


def _hash(leaf: jax.Array) -> jax.Array:
    """Sum of the words, each times an odd number of its place, modulo 2^32."""
    # Values of less than a byte can't be looked at as words.
    bits = leaf.astype(jnp.int8) if leaf.dtype in (jnp.bool_, jnp.int4, jnp.uint4) else leaf
    words = jax.lax.bitcast_convert_type(bits, _WORDS[bits.dtype.itemsize]).astype(jnp.uint32)
    places = [jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) for dim in range(words.ndim)]
    factor = functools.reduce(lambda sofar, place: sofar * jnp.uint32(0x9E3779B1) + place, places, jnp.uint32(1))
    return (words * (2 * factor + 1)).sum(dtype=jnp.uint32)


def non_finite_leaves(state: State) -> list[str]:
    """Paths of the leaves that hold a NaN or an infinity."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jax.device_get(jnp.isfinite(leaf).all())):
            found.append(jax.tree_util.keystr(path))
    return found
