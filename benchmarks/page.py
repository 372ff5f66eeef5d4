"""Tables of docs/results/speed.md, each between two comments with its name."""

import re
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def put(name: str, table: str, page: Path) -> None:
    """Replaces a table on the page, if the page is there."""
    if page.is_file():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        found = re.compile(rf"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
        fresh = f"{marks[0]}\n{table.strip()}\n{marks[1]}"
        page.write_text(found.sub(lambda _: fresh, page.read_text(encoding="utf-8")), encoding="utf-8")
