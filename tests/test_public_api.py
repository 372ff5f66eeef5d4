"""The public names, pinned; and that nothing heavy is loaded before it is needed."""

import subprocess
import sys
from importlib import import_module

import pytest

import dpformer as dp

NAMES = [
    "LanguageModel",
    "Ledger",
    "PhantomClipping",
    "PoissonBatches",
    "PrivateOptimizer",
    "Recommender",
    "UnsupportedUse",
    "calibrate",
    "check",
    "clip",
    "data",
    "evaluation",
    "load",
    "models",
    "normalize",
    "reattention",
    "release_frequencies",
    "softmax_loss",
]


def test_public_names() -> None:
    assert sorted(dp.__all__) == NAMES == dir(dp)
    for name in NAMES:
        assert getattr(dp, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(dp, "nothing_of_this_name")


@pytest.mark.parametrize("package", ["queries", "report", "runs", "serving", "training", "verification.audit"])
def test_names_imported_on_first_use_are_there(package: str) -> None:
    module = import_module(f"dpformer.{package}")
    assert sorted(module.__all__) == sorted(module._HOME)
    for name in module.__all__:
        assert getattr(module, name) is not None


def heavy_modules_after(statement: str) -> str:
    code = f"{statement}\nimport sys\nprint([m for m in ('torch', 'dp_accounting', 'matplotlib') if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[
        -1
    ]


def test_import_is_light() -> None:
    assert heavy_modules_after("import dpformer") == "[]"


def test_help_is_light() -> None:
    run = "import sys\nsys.argv = ['dpformer', '--help']\nfrom dpformer.cli import app\napp(standalone_mode=False)"
    assert heavy_modules_after(run) == "[]"
