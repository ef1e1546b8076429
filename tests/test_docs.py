"""The Python in the documents runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("document", "num_blocks"), [("README.md", 1), ("docs/policies.md", None)])
def test_code_runs_in_its_order(document, num_blocks):
    blocks = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))[:num_blocks]
    assert blocks
    scope = {"__name__": "document"}
    for block in blocks:
        exec(compile(block, document, "exec"), scope)
