"""Vision transformers: sizes as published, patches pixel by pixel, the same gradients under every policy, matmuls by hand."""

import math

import jax
import numpy as np
import pytest

from models.vit import split_into_patches
from remat_kit import StepError
from tests.decoders import make, step_flops
from tests.model_oracles import assert_same_gradients, kept_names

MIXED = "full*1 | save(q,k,v)*1"


@pytest.mark.parametrize(("factory", "published", "width"), [("vit_b16", 86_567_656, 768), ("vit_l16", 304_326_632, 1024)])
def test_has_as_many_parameters_as_published(factory, published, width):
    """But for the class token and its position, which are no more."""
    shapes = jax.tree.leaves(make(factory, image=224).args[0].params)
    assert sum(math.prod(leaf.shape) for leaf in shapes) == published - 2 * width


def test_patches_are_tiles_of_the_image():
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3), np.uint8)
    patches = np.asarray(split_into_patches(images, 2))
    assert patches.shape == (2, 9, 12)
    np.testing.assert_array_equal(patches[1, 5].reshape(2, 2, 3), images[1, 2:4, 4:6])


@pytest.mark.slow
def test_gradients_agree():
    assert_same_gradients("vit_tiny", MIXED)


@pytest.mark.parametrize(("plan", "names"), [("full", {"block_in"}), ("save(q,k,v)", {"block_in", "q", "k", "v"})])
def test_keeps_what_the_policy_says(plan, names):
    assert kept_names(make("vit_tiny", plan)) == names


@pytest.mark.parametrize(("plan", "rerun"), [("full", (2, 2)), (MIXED, (2, 1)), ("none", (0, 0))])
def test_recomputes_what_the_policy_says(plan, rerun):
    """All but the MLP's second matmul in every layer that runs again; `save(q,k,v)` spares one layer its three projections."""
    batch, patches, width, ff = 8, 16, 64, 256
    projection, attention = 2 * batch * patches * width**2, 2 * batch * patches**2 * width
    extra = step_flops(make("vit_tiny", plan)) - step_flops(make("vit_tiny", "none"))
    others = projection + 2 * attention + 2 * batch * patches * width * ff
    assert extra == rerun[0] * others + rerun[1] * 3 * projection


def test_larger_images_are_more_patches():
    step = make("vit_l16", image=1024, batch=8, devices=jax.devices("cpu")[:8])
    assert "patches: 4096 an image" in step.notes
    assert step.args[1]["images"].shape == (8, 1024, 1024, 3)
    assert step.args[0].params["positions"].shape == (4096, 1024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": 30}, "image=30: patches of 8 do not cover it; give a multiple, like image=24."),
        ({"batch": 0}, "batch=0: it must be at least 1."),
        ({"attention": "splash"}, "splash runs on TPUs, not on cpu"),
    ],
)
def test_bad_options_are_step_errors(options, message):
    with pytest.raises(StepError) as caught:
        make("vit_tiny", **options)
    assert message in str(caught.value)
