"""Source archive and wheel: built, installed into an environment of their own by pip, and put to work."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dpformer"
ADDRESS = "https://example.org/dpformer"
OF_BUILD = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md",
            "CITATION.cff", "constraints.txt")  # fmt: skip

pytest.importorskip("setuptools", reason="setuptools is not installed: pip install 'dpformer[test]'")


def source_tree(folder: Path) -> Path:
    """A copy of what belongs to the package, so that nothing is left in the working tree."""
    folder.mkdir()
    for name in OF_BUILD:
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    return folder


def run(*words: object, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", **environment},
    )


def built(kind: str, source: Path, out: Path, **environment: str) -> Path:
    code = f"from setuptools import build_meta; import sys; print(build_meta.build_{kind}(sys.argv[1]))"
    found = run(sys.executable, "-c", code, out, folder=source, DPFORMER_REPOSITORY=ADDRESS, **environment)
    assert found.returncode == 0, found.stderr
    return out / found.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    return built("sdist", source_tree(folder / "source"), folder)


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the archive alone, with compiled kernels."""
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("there is no compiler: apt-get install gcc")
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    return built("wheel", source, folder, DPFORMER_KERNELS="required")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Python of a new environment. Dependencies come by a .pth file from here, without what is editable here."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", folder=tmp_path).stdout.strip()
    here = sysconfig.get_paths()["purelib"]
    (Path(site) / "dependencies.pth").write_text(f"import sys; sys.path.append({here!r})\n")
    return python


def install(python: Path, what: Path, **environment: str) -> None:
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check"]
    found = run(python, "-m", "pip", "install", *options, what, folder=python.parent, **environment)
    assert found.returncode == 0, found.stderr


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(packed.read(name).decode())


def test_archive_and_wheel_hold_the_package_and_nothing_else(archive: Path, wheel: Path) -> None:
    files = {
        f"dpformer/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".c", ".h", ".so")
    }
    with zipfile.ZipFile(wheel) as packed:
        inside = set(packed.namelist())
    compiled = {f"dpformer/kernels/{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in ("_native",)}
    assert {name for name in inside if name.startswith("dpformer/")} == files | compiled
    sources = {f"src/dpformer/kernels/{path.name}" for path in (PACKAGE / "kernels").glob("*.[ch]")}
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {f"src/{name}" for name in files} | sources | {*OF_BUILD} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks", "experiments", "fuzz"))]


def test_metadata_is_complete_and_links_lead_somewhere(wheel: Path) -> None:
    found = metadata(wheel)
    text = str(found.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10 and all(target.startswith("https://") for target in targets)
    assert f"{ADDRESS}/raw/" in text and found["License-Expression"] == "Apache-2.0"
    assert {line.partition(",")[0] for line in found.get_all("Project-URL", [])} >= {"Source", "Documentation"}
    assert found["Description-Content-Type"] == "text/markdown" and found["Requires-Python"] == ">=3.10"


def test_the_wheel_does_the_main_job_with_compiled_kernels(wheel: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, wheel)
    found = run(environment, "-I", ROOT / "scripts" / "check_wheel.py", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "NDCG@10" in found.stdout and "compiled kernels: True" in found.stdout
    assert run(environment.parent / "dpformer", "--version", folder=tmp_path).stdout.split()[0] == "dpformer"


def test_the_archive_installs_without_a_compiler(archive: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, archive, CC="false", CXX="false")
    code = "from dpformer.kernels import native; import dpformer; print(native.kernels, dpformer.__file__)"
    found = run(environment, "-I", "-c", code, folder=tmp_path)
    assert found.stdout.startswith("None ") and str(tmp_path) in found.stdout, found.stderr


@pytest.mark.parametrize(
    ("tag", "changed", "version"),
    [
        (None, False, "0.2.0.dev0"),
        ("v0.2.0", False, "0.2.0"),
        ("v0.2.0rc1", False, "0.2.0rc1"),
        ("v0.2.0", True, "0.2.0.dev0"),
        ("v0.3.0", False, None),
        ("v0.2.0-final", False, None),
    ],
)
def test_a_clean_tag_names_the_version(tmp_path: Path, tag: str | None, changed: bool, version: str | None) -> None:
    source = tmp_path / "source"
    (source / "src" / "dpformer").mkdir(parents=True)
    for name in OF_BUILD:
        shutil.copy(ROOT / name, source / name)
    (source / "src" / "dpformer" / "version.py").write_text('__version__ = "0.2.0.dev0"\n')
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    run("git", "init", "-q", folder=source)
    run("git", "add", ".", folder=source)
    assert run("git", *identity, "commit", "-q", "-m", "all", folder=source).returncode == 0
    if tag is not None:
        run("git", "tag", tag, folder=source)
    if changed:
        (source / "README.md").write_text("changed\n")
    found = run(sys.executable, "setup.py", "--version", folder=source)
    if version is None:
        assert found.returncode and f"the tag {tag} is not of the version 0.2.0.dev0" in found.stderr
    else:
        assert found.stdout.splitlines()[-1] == version, found.stderr


def test_the_version_of_an_archive_stays(tmp_path: Path) -> None:
    """Built from the archive of a tag, outside of git or in another project's checkout."""
    source = source_tree(tmp_path / "source")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: dpformer\nVersion: 0.2.0rc1\n")
    shutil.rmtree(source / "src" / "dpformer" / "kernels")
    found = run(sys.executable, "setup.py", "--version", folder=source)
    assert found.stdout.splitlines()[-1] == "0.2.0rc1", found.stderr
