"""The private names of torch that the project needs are there, do what they are needed for, and stand in one file."""

import ast
from pathlib import Path

import torch

from dpformer import compat
from dpformer.compat import Outside, VmapLevel, physical


def test_all_are_there() -> None:
    for name in compat.__all__:
        assert hasattr(compat, name)
    for module, name in compat.WRAPPERS:
        assert callable(getattr(module, name))


def test_a_level_batches_and_steps_aside() -> None:
    data = torch.randn(3, 2, 5)
    level = VmapLevel(3)
    try:
        one = level.wrap(data)
        assert one.shape == (2, 5) and level.is_current()
        assert torch.equal(physical((one.T @ one).T), (data.mT @ data).mT)
        with Outside():
            assert not level.is_current() and physical(one).shape == (3, 2, 5)
        assert level.is_current()
    finally:
        level.leave()
    assert compat.maybe_current_level() is None


def test_its_own_torch_func_is_as_before() -> None:
    assert torch.equal(torch.func.vmap(torch.sum)(torch.ones(2, 3)), torch.full((2,), 3.0))


def private(name: str) -> bool:
    """A module or function of torch with an underscore at its beginning, or of functorch."""
    parts = name.split(".")
    return parts[0] == "functorch" or (parts[0] == "torch" and any(p.startswith("_") and p[:2] != "__" for p in parts))


def names_in(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def test_no_other_file_names_what_is_private_in_torch() -> None:
    source = Path(compat.__file__).parent
    assert any(map(private, names_in(ast.parse(Path(compat.__file__).read_text(encoding="utf-8")))))
    for file in source.rglob("*.py"):
        if file != Path(compat.__file__):
            names = names_in(ast.parse(file.read_text(encoding="utf-8")))
            assert not set(filter(private, names)), file.relative_to(source)
