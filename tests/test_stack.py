"""`stack` against plain scans: outputs, every gradient, masks, what is stored, matmuls counted in the jaxpr with loop lengths."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apply_oracles import assert_close, assert_equal
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from remat_kit import _jax
from remat_kit.apply.function import remat
from remat_kit.apply.stack import stack
from remat_kit.errors import ForwardModeError, PolicyError, RematWarning, StepError

L, B, D, F = 6, 4, 6, 10
KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = {"up": jax.random.normal(KEYS[0], (L, D, F)) / 3, "down": jax.random.normal(KEYS[1], (L, F, D)) / 3}
X = jax.random.normal(KEYS[2], (B, D))
XS = {"gate": jax.random.normal(KEYS[3], (L, F)), "step": jnp.arange(L)}
CONSTS = {"scale": 1 + jax.random.normal(KEYS[4], (F,)) / 9, "num": jnp.int32(3)}
IS_REMAT3 = _jax.remat3_is_on()
MIXED = "full*2 | save(h)*2 | none*2"


def block(params, x):
    h = checkpoint_name(x @ params["up"], "h")
    return x + jnp.tanh(h) @ params["down"]


def busy_block(params, x, *, xs, consts, key):
    h = checkpoint_name(x @ params["up"], "h") * xs["gate"] + xs["step"]
    h = jnp.tanh(h * consts["scale"] + jnp.cos(consts["scale"])) * consts["num"]
    h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0)
    return x + h @ params["down"], {"norm": (h**2).mean(), "kept": (h != 0).sum(), "x": x}


def busy_loss(differentiable, plan, **options):
    params, x, gate, scale = differentiable
    extra = {"xs": {**XS, "gate": gate}, "consts": {**CONSTS, "scale": scale}, "key": jax.random.key(9, impl="rbg")}
    y, outputs = stack(busy_block, params, x, plan, **extra, **options)
    return (y**2).sum() + (outputs["norm"] * jnp.arange(1, L + 1)).sum(), (y, outputs)


def busy(plan, **options):
    run = jax.value_and_grad(busy_loss, has_aux=True)
    return jax.jit(lambda args: run(args, plan, **options))((PARAMS, X, XS["gate"], CONSTS["scale"]))


def loss(params, x, plan, **options):
    return (stack(block, params, x, plan, **options) ** 2).sum()


def gradient(plan, params=PARAMS, x=X, **options):
    return jax.jit(jax.grad(lambda params, x: loss(params, x, plan, **options), argnums=(0, 1)))(params, x)


@pytest.fixture(scope="module")
def plain():
    return busy("none")


@pytest.fixture(scope="module")
def rematerialized():
    return busy("full")


# With everything that a layer can be given: per-layer inputs, broadcast inputs, a key, integers, outputs with cotangents.
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("save(h)", {}),
        ("full*3 | save(h)", {}),
        (MIXED, {}),
        ("none | full*1", {}),
        ("full", {"group": 2}),
        ("full", {"group": 4}),
        ("full*5 | save(h)", {"group": "sqrt"}),
        ("full", {"group": "recursive"}),
        ("full*3 | save(h)", {"unroll": 2}),
    ],
    ids=str,
)
def test_outputs_and_gradients(plan, options, plain, rematerialized):
    (value, aux), gradients = busy(plan, **options)
    assert_close(gradients, plain[1])
    assert_close((value, aux[0]), (plain[0][0], plain[0][1][0]))
    # What is masked out is counted exactly: the same masks in the same layers.
    assert_equal(aux[1]["kept"], plain[0][1][1]["kept"])
    # Unrolled layers, and jax_remat3's own barriers, are fused otherwise.
    if "unroll" not in options and not IS_REMAT3:
        assert_equal(gradients, rematerialized[1])


def equations(program, times=1):
    """(equation, how often it runs), with the lengths of the loops around it multiplied."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation, times
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner, times * equation.params.get("length", 1))


def num_matmuls(plan, **options):
    program = jax.make_jaxpr(jax.grad(lambda params, x: loss(params, x, plan, **options), argnums=(0, 1)))(PARAMS, X)
    return sum(times for equation, times in equations(program) if equation.primitive.name == "dot_general")


# By hand: a layer has 2 matmuls and 4 more in its backward pass. `full` runs x @ up again (h @ down is needed by nobody). A group
# makes the inputs of its layers again: 2 matmuls a layer, its last layer excepted.
@pytest.mark.parametrize(
    ("plan", "options", "num_again"),
    [
        ("full", {"group": 2}, 6 + 2 * 3),
        ("full", {"group": 3}, 6 + 2 * 4),
        ("full", {"group": 4}, 6 + 2 * (3 + 1)),
        ("full", {"group": "recursive"}, 6 + 2 * 4),  # two groups of three
    ],
    ids=str,
)
def test_matmuls_that_run_again(plan, options, num_again):
    assert num_matmuls(plan, **options) == L * 6 + num_again


@pytest.mark.parametrize(("num_layers", "num_again"), [(2, 0), (3, 0), (4, 2), (7, 4), (8, 8), (16, 24), (64, 160)])
def test_recursive_nesting_runs_half_of_the_layers_again_at_each_level(num_layers, num_again):
    """By Chen et al.: again(L) = L/2 + 2 again(L/2), the first half of each level, and again(2) = 0."""
    params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (num_layers, *leaf.shape[1:])), PARAMS)
    program = jax.make_jaxpr(jax.grad(lambda params: loss(params, X, "full", group="recursive")))(params)
    found = sum(times for equation, times in equations(program) if equation.primitive.name == "dot_general")
    assert found == num_layers * (6 + 1) + 2 * num_again


def stored(plan, fn=loss, params=PARAMS, x=X):
    """Shapes of what crosses from the forward to the backward loops, the whole stack of parameters and scalars left out."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_saved_residuals(lambda params, x: fn(params, x, plan), params, x)
    lines = [line for line in printed.getvalue().splitlines() if "from the argument" not in line]
    shapes = [line.split()[0] for line in lines]
    return sorted(shape for shape in shapes if not shape.endswith("[]"))


def test_what_is_stored():
    # The last residual is y, for the loss.
    carry, h = (lambda n: f"f32[{n},{B},{D}]"), (lambda n: f"f32[{n},{B},{F}]")
    y = f"f32[{B},{D}]"
    assert stored("full*2 | save(h)*4") == sorted([carry(2), carry(4), h(4), y])
    # tanh keeps its result, and 1 minus its square (or both factors of it).
    assert set(stored("none*3 | full*3")) == {carry(3), h(3), y}
    assert stored("full*1 | save(h)*5") == sorted([carry(5), h(5), y])  # x itself is an argument


def test_casts_of_weights_are_not_stored():
    def cast_loss(params, x, plan):
        half = jnp.bfloat16
        run = lambda params, x: x + jnp.tanh(x @ params["up"].astype(half)) @ params["down"].astype(half)  # noqa: E731
        return (stack(run, params, x.astype(half), plan).astype(jnp.float32) ** 2).sum()

    shapes = stored("none*3 | full*3", cast_loss)
    assert not [shape for shape in shapes if f"{D},{F}" in shape or f"{F},{D}" in shape]
    plain = stored("none", cast_loss)
    assert [shape for shape in plain if f"{D},{F}" in shape], "a plain scan keeps them: this test could not fail otherwise"
    grads = [
        jax.jit(jax.grad(lambda params, plan=plan: cast_loss(params, X, plan)))(PARAMS) for plan in ("full", "full*3|none*3")
    ]
    assert_equal(grads[0], grads[1])
    assert grads[1]["up"].dtype == jnp.float32


def test_frozen_parameters_cost_nothing():
    def lora_loss(up, x, plan):
        return loss({"up": up, "down": PARAMS["down"]}, x, plan)

    program = jax.make_jaxpr(jax.grad(lora_loss), static_argnums=2)(PARAMS["up"], X, MIXED)
    # Without the gradient of `down`, a layer's backward pass has 3 matmuls.
    assert sum(n for equation, n in equations(program) if equation.primitive.name == "dot_general") == L * 5 + 2
    assert_close(*(jax.jit(jax.grad(lora_loss), static_argnums=2)(PARAMS["up"], X, plan) for plan in (MIXED, "none")))


def test_closed_over_values_get_gradients():
    def closing(scale, plan):
        return (stack(lambda params, x: block(params, x) * scale, PARAMS, X, plan) ** 2).sum()

    assert_close(*(jax.jit(jax.grad(closing), static_argnums=1)(1.1, plan) for plan in (MIXED, "none")))


def test_carry_of_any_type():
    def odd_loss(params, x, plan):
        def odd(params, carry):
            key, mask_key = jax.random.split(carry["key"])
            y = block(params, carry["x"]) * jax.random.bernoulli(mask_key, 0.7, X.shape)
            return {"x": y, "key": key, "num": carry["num"] + 1, "flag": ~carry["flag"], "sum": carry["sum"] + (y**2).sum()}

        carry = {"x": x, "key": jax.random.key(4, impl="rbg"), "num": 0, "flag": jnp.array(True), "sum": 0.0}
        end = stack(odd, params, carry, plan)
        return end["sum"] * end["num"] + end["flag"]

    assert_close(*(jax.jit(jax.grad(odd_loss, argnums=(0, 1)), static_argnums=2)(PARAMS, X, plan) for plan in (MIXED, "none")))


@pytest.mark.parametrize("plan", ["none", "full", "save(h)"])
def test_one_layer(plan):
    one = jax.tree.map(lambda leaf: leaf[:1], PARAMS)
    assert_close(gradient(plan, one), gradient("none", one))
    text = jax.jit(jax.grad(lambda params: loss(params, X, plan))).lower(one).as_text()
    assert ("optimization_barrier" in text) == (plan != "none")
    assert "stablehlo.while" not in text


def test_barriers_only_where_the_loop_does_not_separate():
    def text(fn, plan, **options):
        return jax.jit(lambda params: fn(params, X, plan, **options)).lower(PARAMS).as_text()

    def grad_loss(params, x, plan, **options):
        return jax.grad(loss)(params, x, plan, **options)

    for plan in ("full", MIXED):
        assert "optimization_barrier" not in text(loss, plan, unroll=L), "evaluation"
        assert "optimization_barrier" in text(grad_loss, plan, unroll=L)
        if not IS_REMAT3:
            assert "optimization_barrier" not in text(grad_loss, plan)


def test_scopes():
    text = jax.jit(jax.grad(loss), static_argnums=2).lower(PARAMS, X, "full*3 | save(h)").compile().as_text()
    assert text is not None
    for scope in ("forward", "recompute", "backward"):
        assert f"remat_kit.{scope}" in text


@pytest.mark.parametrize("plan", ["offload(h)*3 | full", "offload(block_input)*3 | save(h)", "offload(block_input)"])
def test_offload(plan):
    if IS_REMAT3:
        pytest.skip("jax_remat3 has no offloading in 0.10")
    assert_equal(gradient(plan), gradient("full"))
    program = jax.make_jaxpr(jax.grad(lambda params: loss(params, X, plan)))(PARAMS)
    on_host = [v.aval for equation, _ in equations(program) if equation.primitive.name == "scan" for v in equation.outvars]
    num_layers = L if "*" not in plan else 3
    shape = (num_layers, B, F if plan.startswith("offload(h)") else D)
    assert [aval.shape for aval in on_host if "host" in str(aval.memory_space).lower()] == [shape]
    if "block_input" in plan:
        # The stack of inputs on the device is gone: nothing else of that shape leaves a forward loop.
        assert [aval.shape for aval in on_host].count(shape) == 1 + (plan.endswith("save(h)"))


TRANSFORMS = {
    "vmap": lambda both, plan: jax.vmap(lambda x: gradient(plan, x=x))(both),
    "grad of vmap": lambda both, plan: jax.grad(lambda p: jax.vmap(lambda x: loss(p, x, plan))(both).sum())(PARAMS),
    "grad of grad": lambda both, plan: jax.grad(lambda x: (jax.grad(loss, argnums=1)(PARAMS, x, plan) ** 2).sum())(both[1]),
    "checkpoint": lambda both, plan: jax.grad(jax.checkpoint(lambda p: loss(p, both[1], plan)))(PARAMS),
    "map": lambda both, plan: jax.lax.map(lambda x: gradient(plan, x=x), both),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    both = jnp.stack([X, X + 1])
    run = jax.jit(TRANSFORMS[name], static_argnums=1)
    assert_close(run(both, "full*3 | save(h)"), run(both, "none"))


def test_two_stacks():
    def twice(params, plan, other):
        return loss(params, stack(block, params, X, plan), other)

    gradients = [
        jax.jit(jax.grad(twice), static_argnums=(1, 2))(PARAMS, *plans)
        for plans in ((MIXED, "full*1 | save(h)"), ("none", "none"))
    ]
    assert_close(*gradients)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_sharded(axes):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axes,), devices=jax.devices()[:2])
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    axis = "data" if axes == AxisType.Auto else None
    params = {"up": put(PARAMS["up"], None, axis), "down": put(PARAMS["down"], None, None, axis)}
    with jax.set_mesh(mesh):
        got = gradient(MIXED, params, put(X, "data"))
        assert_close(got, gradient("none", params, put(X, "data")))
    for name, leaf in params.items():
        assert got[0][name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_gradient_buffer_is_sharded_like_the_parameters():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    shard = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    params = {"up": jax.ShapeDtypeStruct((4, 64, 128), "float32", sharding=shard(None, "data"))}
    params["down"] = jax.ShapeDtypeStruct((4, 128, 64), "float32", sharding=shard(None, None, "data"))
    x = jax.ShapeDtypeStruct((16, 64), "float32", sharding=shard("data"))

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x, "full*2 | save(h)"))

    text = jax.jit(step, donate_argnums=0).lower(params, x).compile().as_text()
    assert text is not None
    assert "f32[4,16,128]" in text and "f32[4,128,16]" in text
    assert "f32[4,64,128]" not in text and "f32[4,128,64]" not in text


@pytest.mark.parametrize("checks_types", [False, True])
def test_in_shard_map(checks_types):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def sharded(plan):
        def local(params, x):
            y, _ = stack(lambda params, x: (block(params, x), x.mean()), params, x, plan)
            return jax.lax.psum((y**2).sum(), "data")

        specs = (PartitionSpec(), PartitionSpec("data"))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=checks_types)
        return jax.jit(jax.grad(run, argnums=(0, 1)))(PARAMS, X)

    assert_close(sharded(MIXED), sharded("none"))


FORWARD = {
    "jvp": lambda run: jax.jvp(run, (X,), (X,)),
    "jvp of jit": lambda run: jax.jvp(jax.jit(run), (X,), (X,)),
    "jit of jvp": lambda run: jax.jit(lambda x: jax.jvp(run, (x,), (x,)))(X),
    "linearize": lambda run: jax.linearize(run, X)[1](X),
    "jacfwd": lambda run: jax.jacfwd(run)(X),
}


@pytest.mark.parametrize("plan", [MIXED, "full"])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused(name, plan):
    group = 2 if plan == "full" else None
    with pytest.raises(ForwardModeError, match=r"follow different policies, or groups.*use a plan with one policy"):
        FORWARD[name](lambda x: stack(block, PARAMS, x, plan, group=group))
    FORWARD[name](lambda x: stack(block, PARAMS, x, "full"))


def test_nothing_is_traced_twice_for_the_same_call():
    traces = []

    def counted(params, x):
        traces.append(1)
        return block(params, x)

    run = jax.jit(jax.grad(lambda params: (stack(counted, params, X, MIXED) ** 2).sum()))
    run(PARAMS)
    num_traces = len(traces)
    run(jax.tree.map(lambda leaf: leaf + 1, PARAMS))
    assert len(traces) == num_traces == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"plan": "full*4"}, PolicyError, "4 layers, the stack has 6"),
        ({"plan": "full", "group": 9}, PolicyError, "a segment of 6 layers has groups of 2 to 6"),
        ({"plan": "full", "group": "log"}, PolicyError, "'sqrt' or 'recursive'"),
        ({"plan": "none", "group": 2}, PolicyError, "has no two such layers"),
        ({"plan": "decoder=full"}, PolicyError, "takes|taken, like full"),
        ({"plan": "minimal | none*2"}, PolicyError, "remat_kit.resolve"),
        ({"plan": "full", "xs": jnp.ones((L + 1,))}, StepError, "same leading axis"),
    ],
    ids=str,
)
def test_errors(options, error, text):
    with pytest.raises(error, match=text):
        stack(block, PARAMS, X, **options)


@pytest.mark.parametrize("plan", ["full", MIXED])
def test_a_block_that_changes_the_type(plan):
    with pytest.raises(StepError, match=r"gets x of type float32\[4,6\] and returns bfloat16\[4,6\]"):
        stack(lambda params, x: block(params, x).astype(jnp.bfloat16), PARAMS, X, plan)


def test_a_wrapped_block_warns():
    with pytest.warns(RematWarning, match="rematerialized already"):
        stack(remat(block, "full"), PARAMS, X, "full")
