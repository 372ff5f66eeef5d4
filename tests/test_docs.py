"""The documentation: generated pages are current, the reference shows every public name, the site builds."""

import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import dpformer as dp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = spec_from_file_location("generated_pages", ROOT / "scripts" / "generated_pages.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(pages: ModuleType) -> None:
    stale = [name for name in pages.PAGES if (DOCS / name).read_text(encoding="utf-8") != pages.rendered(name)]
    assert not stale, "run: python scripts/generated_pages.py"


def test_the_reference_lists_every_public_name(pages: ModuleType) -> None:
    listed = {name for names in pages.REFERENCE.values() for name in names}
    shown = set(pages.public_objects(sorted(listed)))
    assert set(pages.public_objects(sorted(set(dp.__all__)))) <= shown
    assert next(iter(pages.REFERENCE)) == "Recommender"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "results/runs" not in str(path)}
    assert there == named


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 720


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'dpformer[docs]'")
def test_the_site_builds_without_a_warning_and_documents_every_public_name(pages: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    shown = set(re.findall(r'id="([\w.]+)"', (tmp_path / "site" / "reference" / "index.html").read_text()))
    names = {name for listed in pages.REFERENCE.values() for name in listed}
    assert set(pages.public_objects(sorted(names))) <= shown
