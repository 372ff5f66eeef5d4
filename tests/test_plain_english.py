"""Phrases that may not come back: each is a habit of translation that stops a reader from the field.

A hit names file, line and phrase. Reword the sentence; do not add an exception, unless the phrase is code.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHERE = ("src", "docs", "experiments", "benchmarks", "fuzz", "scripts", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
COUNTED = "loss|row|line|nats|item|token|bit|byte|number|example|object|interaction|sequence|step|sample|file|answer"
UNITS = "user|interaction|token|line|row|item|step|position|example|character|column|parameter|unit|cell|record|sample"
PHRASES = (
    rf"\b(?:one|two|each|{COUNTED}e?s?) (?:{COUNTED})s? an? (?:{UNITS})\b(?! (?:of|with|that|who|has|is))",
    r"\b(?:nats|bits) an? (?:token|character)\b",
    r"\bwhoever\b",
    r"\bsomebody\b",
    r"\b(?:go|goes|going|went) on with\b",
    r"\bnothing in (?:its|their) place\b",
    r"\bleave the house\b",
    r"\bis left to be asked\b",
    r"(?<!there )\bis no (?:data|picture|name|key|ledger|list|audit|number|file|version|budget)\b",
    r"(?<!there )\bis no (?:sample|proof|use|statement|run)\b",
    r"\bproves? itself\b",
    r"\bput to use\b",
    r"\bworked out\b",
    r"\bhas no say\b",
    r"\bstands? in quotes\b",
    r"\bfor people:",
    r"\blet go of\b",
    r"\blogarithmic law\b",
    r"\bby the toss of\b",
    r"\bnoise of (?:a seed|deviation)\b",
    r"\bwith chance \d",
    r"\bthe very (?:file|code|same)\b",
    r"\ba stranger's\b",
    r"\bfor ever\b",
    r"\bin all:",
    r"\bmade[- ]up users\b",
    r"\bspeaks? against the claim\b",
    r"\bis what it says\b",
    r"\bbe it that\b",
    r"\btells? nothing (?:of|about)\b",
)
PATTERN = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES), re.IGNORECASE)


def texts() -> Iterator[Path]:
    for folder in WHERE:
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            text = path.suffix in {".py", ".md", ".html", ".js", ".c", ".ipynb"} and path != Path(__file__)
            if text and "results/runs" not in name:
                yield path
    yield from (ROOT / page for page in PAGES)


def test_phrases_that_may_not_come_back() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in PATTERN.finditer(line)
    ]
    assert not found, "\n".join(found[:60]) + f"\n({len(found)} in total)"


def test_no_sentence_is_cut_in_two() -> None:
    """`return "one half "` and the other half on a line of its own, without parentheses: Python drops the second."""
    cut = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                lines = block if isinstance(block, list) else []
                cut += [
                    f"{path}:{line.lineno}"
                    for before, line in pairwise(lines)
                    if isinstance(line, ast.Expr)
                    and isinstance(line.value, ast.JoinedStr | ast.Constant)
                    and not isinstance(before, ast.Assign | ast.AnnAssign)
                ]
    assert not cut, cut
