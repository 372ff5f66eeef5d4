"""The Python in the guides runs as it stands: all ```python blocks of a page, one after the other."""

import re
from pathlib import Path

import pytest
import torch

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
PAGES: dict[str, list[str] | None] = {
    "bring-your-own-model.md": ["transformers", "peft"],
    "coming-from-opacus.md": [],
    "language-models.md": [],
    "several-machines.md": None,  # its blocks need several processes: tests/distributed runs the same loop
}


@pytest.mark.parametrize("page", [page for page, needed in PAGES.items() if needed is not None])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in PAGES[page] or []:
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (GUIDE / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": page}
    with torch.random.fork_rng(devices=[]):
        for block in blocks:
            exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)", (GUIDE / page).read_text(encoding="utf-8")):
        assert "://" in link or (GUIDE / link).exists(), link
