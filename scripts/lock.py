"""Writes requirements/: the files that constraints.txt stands for, with the SHA-256 that the index of packages gives.

    .venv/bin/python scripts/lock.py      after a change of constraints.txt

`build.txt` is what builds dpformer, `demo.txt` what it needs, `all.txt` the rest. torch is in none of them: which build
is right depends on the machine, and builds of one version differ between indexes.
"""

import os
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parents[1]
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
FILE = re.compile(r'href="[^"]*/([^/"#]+)#sha256=([0-9a-f]{64})"')
PYTHONS = re.compile(r"py3\d*|cp3([2-9]|1[0-4])")  # of wheels
SYSTEMS = re.compile(r"any|(manylinux|linux|macosx|win_amd64).*")
MACHINES = re.compile(r"any|win_amd64|.*_(x86_64|aarch64|arm64|universal2)")


def main() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    names = [name for name in pinned if canonicalize_name(name) != "torch"]
    with ThreadPoolExecutor(8) as workers:
        hashes = dict(zip(names, workers.map(lambda name: hashes_of(name, pinned[name]), names), strict=True))
    if missing := [name for name in names if not hashes[name]]:
        sys.exit(f"{INDEX} has no files of {', '.join(missing)}")
    needed = closure("dpformer")
    files: dict[str, list[str]] = {"build.txt": [], "demo.txt": [], "all.txt": []}
    for name in names:
        key = canonicalize_name(name)
        file = "build.txt" if key == "setuptools" else "demo.txt" if key in needed else "all.txt"
        files[file].append(" \\\n".join([f"{name}=={pinned[name]}", *(f"  --hash=sha256:{h}" for h in hashes[name])]))
    (ROOT / "requirements").mkdir(exist_ok=True)
    for file, lines in files.items():
        (ROOT / "requirements" / file).write_text("\n".join(["# Made by scripts/lock.py", *lines]) + "\n")


def hashes_of(name: str, version: str) -> list[str]:
    """SHA-256 of the files of a version, for the Pythons and systems that are supported."""
    with urllib.request.urlopen(f"{INDEX}/{canonicalize_name(name)}/", timeout=60) as page:
        found = FILE.findall(page.read().decode())
    return sorted({digest for file, digest in found if fits(unquote(file), name, version)})


def fits(file: str, name: str, version: str) -> bool:
    """Whether a file is of this version and may be installed here or on another supported system."""
    try:
        if not file.endswith(".whl"):
            found, number = parse_sdist_filename(file)
            return found == canonicalize_name(name) and str(number) == version
        found, number, _, tags = parse_wheel_filename(file)
    except ValueError:  # a name of long ago
        return False
    return str(number) == version and any(
        PYTHONS.fullmatch(tag.interpreter) and SYSTEMS.fullmatch(tag.platform) and MACHINES.fullmatch(tag.platform)
        for tag in tags
    )


def closure(name: str) -> set[str]:
    """The packages that one of this environment needs without extras, and all that these need."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        try:
            needed = [Requirement(text) for text in requires(waiting.pop()) or ()]
        except PackageNotFoundError:
            continue
        for one in needed:
            key = canonicalize_name(one.name)
            if (one.marker is None or one.marker.evaluate({"extra": ""})) and key not in found:
                found.add(key)
                waiting.append(key)
    return found


if __name__ == "__main__":
    main()
