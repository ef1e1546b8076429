"""What the tests of `remat` and `rematerialize` hold results against: residuals, matmuls and regions, counted by themselves."""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import print_saved_residuals

_LINE = re.compile(r"\w+\[(?P<shape>[\d,]*)\] (?:named '(?P<name>[^']*)'|(?P<source>from|output))")
_REGIONS = ("checkpoint", "remat2")


def residuals(fn, *args) -> list[tuple[str | None, tuple[int, ...]]]:
    """Name and shape of every residual that is not an argument or a constant."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_saved_residuals(fn, *args)
    found = [match for line in printed.getvalue().splitlines() if (match := _LINE.match(line))]
    return [
        (match["name"], tuple(int(size) for size in match["shape"].split(",") if size))
        for match in found
        if match["source"] != "from"
    ]


def residual_names(fn, *args) -> list[str]:
    return sorted(name for name, _ in residuals(fn, *args) if name)


def residual_bytes(fn, *args) -> int:
    """Of 4-byte residuals."""
    return 4 * sum(int(np.prod(shape)) for _, shape in residuals(fn, *args))


def equations(program: Any) -> Iterator[Any]:
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def count(fn, *args, of: tuple[str, ...]) -> int:
    return sum(equation.primitive.name in of for equation in equations(jax.make_jaxpr(fn)(*args)))


def num_matmuls(fn, *args) -> int:
    return count(fn, *args, of=("dot_general",))


def num_regions(fn, *args) -> int:
    return count(fn, *args, of=_REGIONS)


def num_barriers(fn, *args) -> int:
    return jax.jit(fn).lower(*args).as_text().count("optimization_barrier")


def largest(tree: Any) -> float:
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def assert_close(got: Any, wanted: Any, *, bound: float = 2e-6) -> None:
    """Every leaf within `bound` times the largest entry of the tree: design.md, 2.7."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    limit = bound * largest(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


def assert_equal(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
