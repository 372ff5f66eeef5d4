"""The built wheel, installed into an environment of its own, has everything that `dpformer demo` needs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what belongs to the package, so that nothing is left in the working tree."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, env=environment
    )
    assert found.returncode == 0, found.stderr
    return folder / found.stdout.splitlines()[-1]


def test_files_that_are_not_python_are_in_it(wheel: Path) -> None:
    inside, package = set(zipfile.ZipFile(wheel).namelist()), ROOT / "src" / "dpformer"
    there = {
        f"dpformer/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".c"
    }
    assert there <= inside


def test_demo_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Installed without dependencies; those come by a .pth file from here, without what is editable here."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    zipfile.ZipFile(wheel).extractall(site)
    here = sysconfig.get_paths()["purelib"]
    (site / "dependencies.pth").write_text(f"import sys; sys.path.append({here!r})\n")
    code = (
        "import dpformer, sys; assert dpformer.__file__.startswith(sys.prefix), dpformer.__file__; "
        "sys.argv = ['dpformer', 'demo', '--quick']; from dpformer.cli import main; main()"
    )
    found = subprocess.run(
        [python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert found.returncode == 0, found.stderr
    assert "NDCG@10" in found.stdout and (tmp_path / "runs" / "demo" / "report.html").is_file()
    scripts = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    assert "dpformer = dpformer.cli:main" in zipfile.ZipFile(wheel).read(scripts).decode()
