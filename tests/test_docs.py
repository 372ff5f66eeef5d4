"""The documentation: generated pages are current, the reference shows every public name, the site builds."""

import re
import shutil
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


def test_pages_of_results_are_short() -> None:
    """At most 600 words around tables and commands; notes are pages under Experiments."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("- Benchmarks:")[1].split("- Experiments:")[0]
    pages = re.findall(r": ([\w/.-]+\.md)$", nav, re.MULTILINE)
    assert pages
    for page in pages:
        text = re.sub(r"<!--.*?-->", "", (DOCS / page).read_text(encoding="utf-8"))
        words = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
        assert len(" ".join(words).split()) <= 600, page


@pytest.mark.skipif(find_spec("zensical") is None, reason="zensical is not installed: pip install 'dpformer[docs]'")
def test_the_site_builds_without_a_warning_and_documents_every_public_name(pages: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("runs"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]
    page = (tmp_path / "build" / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'id="([\w.]+)"', page))
    names = {name for listed in pages.REFERENCE.values() for name in listed}
    assert set(pages.public_objects(sorted(names))) <= shown
