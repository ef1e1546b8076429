"""The words of the policy grammar and the presets, as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit.policy import Action
from remat_kit.presets import PRESETS

_WORDS = (
    ("none", "no rematerialization: everything the backward pass needs is kept"),
    ("full", "only each block's input is kept, the rest is recomputed"),
    ("save(NAME, …)", "keep the values with these names; * matches anything"),
    ("offload(NAME, …)", "keep them in host memory"),
    ("recompute(NAME, …)", "recompute them, whatever an earlier rule says"),
    ("dots", "keep every matrix multiplication and convolution"),
    ("dots_no_batch", "keep every matrix multiplication without batch dimensions"),
    ("weights", "keep matmuls of an activation with parameters, also batched or under vmap"),
    ("kernels", "keep attention and other custom kernels, with all their outputs"),
    ("smaller(1MiB)", "keep every value of at most this size"),
    ("cheap(8)", "recompute what costs at most 8 FLOPs for each byte of its output"),
    ("RULE+RULE", "several rules; later ones win"),
    ("POLICY*N | POLICY*M", "N layers of one policy, then M of another"),
    ("STACK=PLAN; STACK=PLAN", "a plan per stack of the step"),
)


def write_policies(console: Console) -> None:
    """Writes the grammar and the presets with their sources."""
    words = Table(title="Policies", box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    words.add_column("text")
    words.add_column("keeps")
    for text, meaning in _WORDS:
        words.add_row(Text(text), Text(meaning))
    presets = Table(title="Presets", box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in ("name", "keeps", "roles", "source"):
        presets.add_column(column, overflow="fold")
    for name, row in PRESETS.items():
        roles = ", ".join((*row.roles, *row.kinds))
        kept = "offloads" if row.action is Action.OFFLOAD else "saves"
        presets.add_row(Text(name), Text(row.summary), Text(f"{kept} {roles}"), Text(row.source))
    console.print(words)
    console.print(presets)
