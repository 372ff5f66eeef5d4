"""What pyproject.toml cannot say: the version of a tagged build, links of the README, and the compiled kernels.

Environment of a build:

    DPFORMER_REPOSITORY  address of the public repository, to which links of the README lead; without it they are text
    DPFORMER_KERNELS     "required": fail without a compiler; by default Python then does what the kernels do
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNELS = ROOT / "src" / "dpformer" / "kernels"
VERSION_FILE = Path("dpformer", "version.py")
TAG = re.compile(r"v(\d+\.\d+\.\d+)((?:a|b|rc)\d+)?")
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+://|#)([^)\s]+)\)")
FLAGS = [] if sys.platform == "win32" else ["-O3", "-fno-math-errno", "-fno-trapping-math"]


def git(*words: str) -> str:
    """What git says of this checkout; nothing where this is none, or git is missing."""
    if not (ROOT / ".git").exists():  # a source archive unpacked in another project's checkout
        return ""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def version() -> str:
    """Of the tag at a clean HEAD; else of the source archive; else the version in development."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "src" / VERSION_FILE).read_text(encoding="utf-8"))
    assert found is not None
    tag = git("describe", "--tags", "--exact-match", "--match", "v[0-9]*")
    if tag and not git("status", "--porcelain", "--untracked-files=no"):
        parts = TAG.fullmatch(tag)
        if parts is None or parts[1] != found[1].partition(".dev")[0]:
            raise SystemExit(f"the tag {tag} is not of the version {found[1]} in {VERSION_FILE}: change one of them")
        return tag[1:]
    if (ROOT / "PKG-INFO").exists():
        archive = re.search(r"^Version: (\S+)$", (ROOT / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE)
        assert archive is not None
        return archive[1]
    return found[1]


def readme(repository: str, commit: str) -> str:
    """The README with links that lead somewhere from an index, too."""

    def absolute(link: "re.Match[str]") -> str:
        image, text, target = link.groups()
        if not repository:
            return "" if image else text
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/{commit}/{target})"

    text = LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))
    linked_image = re.compile(r"\[(!\[[^\]]*\]\([^)]*\))?\]\((?![a-z]+://)([^)\s]+)\)")
    return linked_image.sub(lambda link: f"[{link[1]}]({repository}/blob/{commit}/{link[2]})" if link[1] else "", text)


class BuildPy(build_py):
    """Writes the version of the build into the package that is built, not into the source."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            built = Path(self.build_lib) / VERSION_FILE
            text = built.read_text(encoding="utf-8")
            built.write_text(re.sub(r'__version__ = ".+"', f'__version__ = "{VERSION}"', text), encoding="utf-8")


VERSION = version()
REPOSITORY = os.environ.get("DPFORMER_REPOSITORY", "").rstrip("/")
COMMIT = git("rev-parse", "HEAD") or f"v{VERSION}"

setup(
    version=VERSION,
    long_description=readme(REPOSITORY, COMMIT),
    long_description_content_type="text/markdown",
    project_urls={
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/{COMMIT}/docs/README.md",
        "Changelog": f"{REPOSITORY}/blob/{COMMIT}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    if REPOSITORY
    else {},
    cmdclass={"build_py": BuildPy},
    ext_modules=[
        Extension(
            f"dpformer.kernels.{name}",
            [f"src/dpformer/kernels/{name}.c"],
            depends=[str(path.relative_to(ROOT)) for path in KERNELS.glob("*.h")],
            extra_compile_args=FLAGS,
            optional=os.environ.get("DPFORMER_KERNELS") != "required",
        )
        for name in ("_native",)
    ],
)
