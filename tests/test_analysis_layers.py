"""Layers that are modules of their own, as in models that nobody wrote for scan: their values share a line of the peak."""

import pytest

from remat_kit.analysis.arguments import Argument
from remat_kit.analysis.labels import layer_patterns, vocabulary_of
from remat_kit.analysis.shapes import ArrayShape
from remat_kit.memory import PeakKind


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["h/0/mlp", "h/1/mlp"], {"h/*/mlp"}),
        (["p['h']['0']['up']", "p['h']['11']['up']"], {"p['h']['*']['up']"}),
        ([f"Block_{index}/up" for index in range(3)], {"Block_*/up"}),
        (["h/0/ln_1", "h/1/ln_1", "h/0/ln_2", "h/1/ln_2"], {"h/*/ln_1", "h/*/ln_2"}),
        (["up", "layer1x1/dot"], {"up", "layer1x1/dot"}),
    ],
)
def test_a_layer_s_number_becomes_a_star(names, patterns):
    assert set(layer_patterns(names).values()) == patterns


def argument(path, kind, *dims):
    return Argument(number=0, path=path, kind=kind, local=ArrayShape(dtype="f32", dims=dims), global_dims=dims)


def test_the_length_of_learned_positions_is_no_vocabulary():
    arguments = [
        argument("params['wte']['embedding']", PeakKind.PARAMETERS, 50257, 768),
        argument("params['wpe']['embedding']", PeakKind.PARAMETERS, 1024, 768),
        argument("tokens", PeakKind.BATCH, 4, 1024),
    ]
    assert vocabulary_of(arguments) == {50257}
