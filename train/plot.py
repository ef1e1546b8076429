"""A picture of a run out of its `metrics.jsonl`: the loss, what was held out, and the model that knows nothing."""

import importlib
from pathlib import Path
from typing import Any

from train.folder import PLOT_FILE
from train.metrics import read_lines


def plot_run(folder: Path, *, floor: float | None, floor_name: str) -> str:
    """Draws `loss.png`.

    Args:
        folder: Of the run.
        floor: A loss to compare with, drawn as a line; None = none.
        floor_name: Whose loss it is.

    Returns:
        For people: where the picture is, or why there is none.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        return "no plot: matplotlib is not installed (pip install matplotlib, or give --no-plot)"
    lines = read_lines(folder)
    figure = figures.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label in (("loss", "training"), ("held_out_loss", "held out")):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 20 else None)
    if floor is not None:
        axes.axhline(floor, linestyle="--", color="grey", label=floor_name)
    axes.set(xlabel="step", ylabel="loss (nats)")
    axes.locator_params(axis="x", integer=True)
    axes.legend()
    figure.savefig(folder / PLOT_FILE, dpi=120)
    return f"plot: {folder / PLOT_FILE}"
