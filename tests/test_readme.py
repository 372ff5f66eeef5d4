"""The README's example runs as it stands, and the README names what it must."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})


def test_the_two_commands_come_first() -> None:
    opening = "\n".join(README.read_text(encoding="utf-8").splitlines()[:40])
    assert "scripts/demo" in opening and "scripts/test" in opening
