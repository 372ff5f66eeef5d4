import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from dpformer.errors import DpformerError
from dpformer.runs import checkpoint
from dpformer.runs.checkpoint import load_checkpoint, save_checkpoint

STATE: dict[str, Any] = {
    "step": 3,
    "tensors": [torch.arange(6.0).view(2, 3), torch.tensor(2, dtype=torch.int64), torch.zeros(0)],
    "optimizer": {0: {"step": torch.tensor(1.0)}, "lr": 1e-3, "betas": (0.9, 0.999), "none": None, "flag": True},
    "key": b"\x00\xff",
    "big": 2**70,
    "inf": float("inf"),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and a == b)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state.safetensors"
    save_checkpoint(path, STATE, config="c", data="d")
    return path


def test_what_comes_back_is_what_was_saved(path: Path) -> None:
    state = load_checkpoint(path, config="c", data="d")
    assert state.pop("data") == "d"
    assert same(state, STATE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds the keys"
    assert os.listdir(path.parent) == [path.name]


def test_there_is_no_pickle_to_fall_into(path: Path) -> None:
    with pytest.raises(TypeError, match="a set cannot be part of a checkpoint"):
        save_checkpoint(path, {"x": {1}}, config="c", data="d")
    assert same(load_checkpoint(path, config="c", data="d")["step"], 3), "the former one is untouched"


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -1])
def test_torn_files_are_refused(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DpformerError, match="is not an intact dpformer checkpoint"):
        load_checkpoint(path, config="c", data="d")


def test_any_flipped_byte_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for at in range(0, len(content), 23):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(DpformerError) as error:
            load_checkpoint(path, config="c", data="d")
        assert "\n" not in str(error.value)


def test_foreign_files_are_refused(path: Path) -> None:
    from safetensors.torch import save_file

    for content in (b"junk", json.dumps({"a": 1}).encode(), b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(DpformerError, match="is not an intact dpformer checkpoint"):
            load_checkpoint(path, config="c", data="d")
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(DpformerError, match="is not an intact dpformer checkpoint"):
        load_checkpoint(path, config="c", data="d")


def test_another_config_data_or_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DpformerError, match=r"made with another config; restore config.toml"):
        load_checkpoint(path, config="x", data="d")
    with pytest.raises(DpformerError, match="made with other data"):
        load_checkpoint(path, config="c", data="x")
    assert load_checkpoint(path, config="c")["data"] == "d"
    monkeypatch.setattr("dpformer.__version__", "9.9")
    with pytest.raises(DpformerError, match=r"made with dpformer .*, this is 9.9; resume with that version"):
        load_checkpoint(path, config="c", data="d")


def test_a_full_disk_leaves_the_former_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, file: Path, header: Any) -> None:
        Path(file).write_bytes(b"half")
        raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(DpformerError, match="No space left on device") as error:
        save_checkpoint(path, {"step": 4}, config="c", data="d")
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert load_checkpoint(path, config="c", data="d")["step"] == 3
    assert os.listdir(path.parent) == [path.name], "nothing half-written"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_file_size_limit_of_the_system_is_one_sentence(path: Path) -> None:
    """The real thing, not a stand-in: the system refuses to write more, as a full disk or a quota does."""
    import resource
    import signal

    child = os.fork()
    if child == 0:
        code = 3
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            save_checkpoint(path, {"big": torch.zeros(10_000)}, config="c", data="d")
        except DpformerError as error:
            code = 0 if "cannot be written" in str(error) and "\n" not in str(error) else 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert load_checkpoint(path, config="c", data="d")["step"] == 3
    assert os.listdir(path.parent) == [path.name]
