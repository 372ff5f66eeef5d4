"""The page on dependencies names each of them, and no other."""

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert found is not None
    return found[0]


def test_the_page_and_the_project_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    always, _, rest = page.partition("## Extras")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (always + rest).splitlines() if line[:2] == "| "
    ]
    listed = {row[0] for row in rows[: always.count("\n| ")] if row[0] not in ("package", "---")}
    assert listed == {name(each) for each in project["dependencies"]}
    extras = {row[0]: set(row[1].split(", ")) for row in rows if row[0] in project["optional-dependencies"]}
    taken = {
        extra: {name(each) for each in needed if not each.startswith("dpformer[")}
        for extra, needed in project["optional-dependencies"].items()
    }
    taken["test"] -= taken["iceberg"]  # with the catalogue of the tests
    assert extras == taken


def test_all_of_the_tests_are_pinned() -> None:
    """What scripts install is what was tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = [extra for extra in project["optional-dependencies"] if extra not in ("bench", "fuzz", "mlflow")]
    needed = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    names = {name(each).lower().replace("_", "-") for each in needed} - {"dpformer", "tomli"}
    assert names <= pinned, names - pinned


def test_every_pinned_package_but_torch_has_hashes() -> None:
    """torch's builds differ between indexes; the page says so."""
    versions = set((ROOT / "constraints.txt").read_text().splitlines()[1:])
    hashed: list[str] = []
    for file in ("build.txt", "demo.txt", "all.txt"):
        for entry in (ROOT / "requirements" / file).read_text().replace("\\\n", "").splitlines()[1:]:
            version, *hashes = entry.split()
            assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry
            hashed.append(version)
    assert len(hashed) == len(set(hashed)) and versions - set(hashed) == {"torch==2.13.0"} and set(hashed) <= versions
    setup = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    assert setup.count("install --require-hashes --no-deps") == 2
