"""`rematerialize`: policies by module path, for Linen and NNX models as they are; the trace key, nesting, threads, complaints."""

import threading
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from apply_oracles import assert_close, assert_equal, num_matmuls, num_regions, residual_names, residuals
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit.apply.paths import PathRule, rematerialize
from remat_kit.errors import ApplyError, PolicyError, RematWarning
from remat_kit.policy import FULL

X = jax.random.normal(jax.random.key(0), (4, 8))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(checkpoint_name(jnp.tanh(nn.Dense(16, name="up")(x)), "act"))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + Mlp(name="mlp")(nn.LayerNorm(name="norm")(x))


class Lm(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(3):
            x = Block(name=f"h_{index}")(x)
        return nn.Dense(5, name="head")(x)


class ScanLm(nn.Module):
    wrap: Callable[..., Any] = staticmethod(lambda block: block)

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return Block(name="block")(x), None

        layers = nn.scan(self.wrap(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(jnp.tanh(self.up(x))))


class NnxLm(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MODEL: Any = Lm()
PARAMS = MODEL.init(jax.random.key(1), X)
BETWEEN = ["h_0", "h_1", "h_2"]  # what each layer hands to the next is that one's input, and stays


def loss(params, x=X):
    return jnp.square(MODEL.apply(params, x)).mean()


def under(policies, fn=loss, **options):
    return rematerialize(policies, **options)(fn)


def regions_now(fn, *args):
    return num_regions(lambda *args: fn(*args), *args)  # a new function: JAX has no trace of it


@pytest.mark.parametrize(
    ("policies", "saved", "extra_matmuls", "num_wrapped"),
    [
        ({"h_*": "none"}, None, 0, 0),
        ({"h_*": "full"}, [], 3, 3),
        ({"h_*": "save(*/up)"}, ["h_0/mlp/up", "h_1/mlp/up", "h_2/mlp/up"], 0, 3),
        # The derivative of tanh reads its result before it is named, so that the matmul before it is run again.
        ({"h_*": "save(act)"}, ["act", "act", "act"], 3, 3),
        ({"h_*": "save(h_1/mlp/up)"}, ["h_1/mlp/up"], 2, 3),
        ({"h_*": "full", "h_2": "none"}, None, 2, 2),
        ({"h_1": "full"}, None, 1, 1),
        ({"*/mlp": "full"}, None, 3, 3),
        ({"**/mlp": "full"}, None, 3, 3),
    ],
    ids=str,
)
def test_modules_that_match_are_rematerialized(policies, saved, extra_matmuls, num_wrapped):
    run = under(policies)
    if saved is not None:
        assert residual_names(run, PARAMS) == sorted([*saved, *BETWEEN])
    assert num_matmuls(jax.grad(run), PARAMS) == num_matmuls(jax.grad(loss), PARAMS) + extra_matmuls
    assert regions_now(run, PARAMS) == num_wrapped


def test_gradients_are_those_without_remat_and_equal_between_policies():
    wanted = jax.jit(jax.value_and_grad(loss))(PARAMS)
    policies = [{"h_*": "full"}, {"h_*": "save(*/up)"}]
    for each in policies:
        assert_close(jax.jit(jax.value_and_grad(under(each)))(PARAMS), wanted)
    # Operation by operation, so that nothing is fused: the same operations on the same values.
    full, saving = (jax.value_and_grad(under(each))(PARAMS) for each in policies)
    assert_equal(saving, full)


def test_names_alone_change_nothing():
    assert_equal(jax.jit(jax.grad(under({"h_*": "none"})))(PARAMS), jax.jit(jax.grad(loss))(PARAMS))


def test_parameters_made_in_the_context_are_the_same():
    with rematerialize({"h_*": "full"}):
        assert_equal(MODEL.init(jax.random.key(1), X), PARAMS)


def test_a_jit_made_before_is_traced_again_and_one_made_inside_does_not_leak():
    traces = []

    def fresh(params):
        traces.append(1)
        return loss(params)

    before = jax.jit(fresh)
    assert regions_now(before, PARAMS) == 0
    before(PARAMS)
    with rematerialize({"h_*": "full"}):
        assert regions_now(before, PARAMS) == 3
        inside = jax.jit(fresh)
        inside(PARAMS)
        with rematerialize({"head": "full"}):
            assert regions_now(before, PARAMS) == 4
        assert regions_now(before, PARAMS) == 3
    assert regions_now(before, PARAMS) == regions_now(inside, PARAMS) == 0
    num_traces = len(traces)
    before(PARAMS)
    assert len(traces) == num_traces


def test_the_second_entering_compiles_nothing_and_is_no_error():
    num_traces = []

    @jax.jit
    def step(params):
        num_traces.append(1)
        return jax.grad(loss)(params)

    for _ in range(3):
        with rematerialize({"h_*": "save(act)"}):
            step(PARAMS)
    assert len(num_traces) == 1


def test_inner_contexts_add_to_outer_ones_and_win():
    with rematerialize({"h_*": "full"}):
        with rematerialize({"h_1": "none", "head": "full"}):
            assert regions_now(loss, PARAMS) == 3  # h_0, h_2, head
        assert regions_now(loss, PARAMS) == 3  # h_0, h_1, h_2
    assert regions_now(loss, PARAMS) == 0


def test_other_threads_are_not_in_the_context():
    run = jax.jit(lambda params: loss(params))
    inside, checked = threading.Event(), threading.Event()
    found = {}

    def other():
        inside.wait(60)
        found["other"] = regions_now(run, PARAMS)
        with rematerialize({"head": "full"}):
            found["own"] = regions_now(run, PARAMS)
        checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with rematerialize({"h_*": "full"}):
        inside.set()
        assert checked.wait(120)
        found["main"] = regions_now(run, PARAMS)
    thread.join()
    assert found == {"other": 0, "own": 1, "main": 3}


def test_an_error_inside_leaves_the_context_and_is_not_replaced():
    with pytest.raises(ZeroDivisionError), rematerialize({"nothing": "full"}):
        raise ZeroDivisionError
    assert regions_now(loss, PARAMS) == 0


def test_scanned_layers_have_one_path_and_may_be_rematerialized_within_the_loop():
    model: Any = ScanLm()
    params = model.init(jax.random.key(1), X)
    run = lambda params: jnp.square(model.apply(params, X)).mean()  # noqa: E731
    saving = rematerialize({"layers/block": "save(layers/block/mlp/up)"})(run)
    assert regions_now(saving, params) == 1
    assert_close(jax.jit(jax.grad(saving))(params), jax.jit(jax.grad(run))(params))
    # The stacked residual is the named one: [layers, batch, width of up], and the carry.
    stacked = [shape for _, shape in residuals(rematerialize({"layers/block": "full"})(run), params) if shape[:1] == (3,)]
    assert (3, 4, 16) not in stacked
    assert (3, 4, 16) in [shape for _, shape in residuals(saving, params)]


def test_a_model_that_rematerializes_itself_is_pointed_out():
    model = ScanLm(nn.remat)
    params = model.init(jax.random.key(1), X)
    with pytest.warns(RematWarning, match="'layers/block' runs within a jax.checkpoint of the model's own"):
        rematerialize({"layers/block": "full"})(model.apply)(params, X)


def test_a_match_within_a_match_is_pointed_out():
    with pytest.warns(RematWarning, match="'h_0/mlp' runs within 'h_0', which is rematerialized by a pattern too"):
        under({"h_*": "full", "h_0/mlp": "full"})(PARAMS)


@pytest.mark.parametrize(
    ("policies", "text"),
    [
        (
            {"g_*": "full"},
            r"'g_\*' matches nothing.* Did you mean 'h_\*'\? The modules that ran: h_\*, h_\*/norm, h_\*/mlp, .*head",
        ),
        ({"h_*": "full", "*/*/*/*": "full"}, r"'\*/\*/\*/\*' matches nothing"),
        ({"up": "full"}, "'up' matches nothing"),
        ({"h_*": "save(h_0/mlp/upp)"}, r"'save\(h_0/mlp/upp\)' for 'h_\*' speaks of 'h_0/mlp/upp'.*Did you mean 'h_\*/mlp/up'"),
        (
            {"h_*": "save(act)+recompute(hh)"},
            "speaks of 'hh', and no value in the matching modules has that name. They have: act, ",
        ),
        ({"h_*": "save(head)"}, "speaks of 'head', and no value in the matching modules"),
        ({"h_*": "save(h_0)"}, "speaks of 'h_0', and that is the output of a rematerialized module itself"),
    ],
)
def test_what_fits_nothing_is_an_error_on_leaving(policies, text):
    with pytest.raises(ApplyError, match=text):
        under(policies)(PARAMS)


def test_a_context_in_which_nothing_is_traced_is_an_error():
    with pytest.raises(ApplyError, match=r"no module was traced while 'h_\*' was to be rematerialized: the model did not run"):
        rematerialize({"h_*": "save(act)+recompute(*/up)"})(lambda: None)()
    compiled = jax.jit(lambda params: loss(params)).lower(PARAMS).compile()
    with pytest.raises(ApplyError, match="compiled ahead of time"), rematerialize({"h_*": "recompute(act)"}):
        compiled(PARAMS)


def test_a_name_that_a_custom_vjp_may_hold_is_a_warning_only():
    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x)

    kernel.defvjp(lambda x: (checkpoint_name(jnp.sin(x), "kernel_out"), x), lambda x, g: (g * jnp.cos(x),))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Sequential([nn.Dense(8), kernel], name="block")(x)

    params = Model().init(jax.random.key(0), X)
    with pytest.warns(RematWarning, match="speaks of 'kernel_out', and no value with that name was seen; rules of a custom_vjp"):
        rematerialize({"block": "save(kernel_out)"})(Model().apply)(params, X)


@pytest.mark.parametrize("pattern", ["", "/"])
def test_patterns_have_a_path(pattern):
    with pytest.raises(ApplyError, match="no module pattern"):
        rematerialize({pattern: "full"})


def test_policies_are_read_where_they_are_given():
    with pytest.raises(ApplyError, match="has no pattern"):
        rematerialize({})
    with pytest.raises(PolicyError, match="Did you mean 'full'"):
        rematerialize({"h_*": "ful"})


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("h/*", "h/0", True),
        ("h/*", "h/0/mlp", False),
        ("h/**", "h/0/mlp", True),
        ("h/**", "h", False),
        ("**/mlp", "mlp", True),
        ("**/mlp", "a/b/mlp", True),
        ("**/mlp", "a/bmlp", False),
        ("layers_*/mlp", "layers_12/mlp", True),
        ("h.0", "hx0", False),
        ("**", "", False),
        ("**", "h", True),
    ],
)
def test_patterns(pattern, path, is_match):
    assert PathRule(pattern=pattern, policy=FULL).matches(path) is is_match


def nnx_run(policies):
    model = NnxLm()

    @nnx.jit
    def step(model, x):
        return nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)

    results = []
    for _ in range(2):
        if policies is None:
            results.append(step(model, X))
        else:
            with rematerialize(policies, model):
                results.append(step(model, X))
    assert type(model.blocks[0]) is NnxBlock
    assert type(model.blocks[0].up) is nnx.Linear
    assert float(results[0][0]) != float(results[1][0])
    return results, [int(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.RngCount))]


def test_nnx_gradients_and_dropout_are_those_without_remat():
    (wanted, counts), (full, full_counts), (saving, saving_counts) = map(
        nnx_run, (None, {"blocks/*": "full"}, {"blocks/*": "save(*/up)"})
    )
    assert counts == full_counts == saving_counts
    assert_close(full, wanted)
    assert_equal(saving, full)


@pytest.mark.parametrize(("policy", "saved"), [("full", []), ("save(blocks/1/up)", ["blocks/1/up"])])
def test_nnx_modules_that_match_are_rematerialized(policy, saved):
    between = ["blocks/0", "blocks/1"]  # the input of each next layer
    graphdef, state = nnx.split(NnxLm())

    def run(state, x):
        model = nnx.merge(graphdef, state)
        with rematerialize({"blocks/*": policy}, model):
            return (model(x) ** 2).mean()

    assert residual_names(run, state, X) == sorted([*saved, *between])
    assert num_regions(run, state, X) == 3


def test_nnx_models_are_found_among_the_arguments_of_a_decorated_function():
    run = rematerialize({"blocks/*": "full"})(lambda model, x: model(x))
    graphdef, state = nnx.split(NnxLm())
    assert num_regions(lambda state, x: run(nnx.merge(graphdef, state), x), state, X) == 3


def test_nnx_models_have_to_be_given():
    with pytest.raises(ApplyError, match=r"an NNX model that was not given: rematerialize\(policies, model\)"):
        rematerialize({"blocks/*": "recompute(*/up)"})(lambda: NnxLm()(X))()
    with pytest.raises(ApplyError, match=r"'block/\*' matches nothing. Did you mean 'blocks/\*'"):
        rematerialize({"block/*": "full"})(lambda model: model(X))(NnxLm())


def test_an_nnx_model_is_as_it_was_in_other_threads_and_after_nested_contexts():
    model, found = NnxLm(), {}

    def regions():
        graphdef, state = nnx.split(model)
        return num_regions(lambda state: nnx.merge(graphdef, state)(X), state)

    with rematerialize({"blocks/*": "full"}, model):
        with rematerialize({"blocks/1": "none"}, model):
            found["inner"] = regions()
        found["outer"] = regions()
        thread = threading.Thread(target=lambda: found.update(other=regions()))
        thread.start()
        thread.join()
    found["after"] = regions()
    assert found == {"inner": 2, "outer": 3, "other": 0, "after": 0}
    assert type(model.blocks[1]) is NnxBlock
