"""The code of the guides in docs/ runs as it stands, from the first block to the last."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["layers.md", "pruning.md", "training.md"])
def test_code_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "guide"})
