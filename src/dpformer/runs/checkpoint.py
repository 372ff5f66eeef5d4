"""Checkpoints: everything a run needs to resume bit for bit, in one file that is replaced atomically. No pickle.

One safetensors file holds the tensors of the state; its header holds everything else as JSON (counters, keys, and the
names of the tensors), the version that wrote it, and a digest. It contains the keys of sampling and noise, with which
the noise could be subtracted again; so it is private, and deleted when the run has finished.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import dpformer
from dpformer.errors import DpformerError
from dpformer.files import replacing

FORMAT = 3  # 2 used other names for released values


def save_checkpoint(path: Path, state: dict[str, Any], *, config: str, data: str) -> None:
    """Replace the checkpoint atomically; after an error the previous one is still intact.

    Args:
        path: the file.
        state: nested dicts, lists, tuples of tensors, numbers, texts, bytes and None.
        config: hash of the config, which must match on resume.
        data: hash of the data, likewise.
    """
    tensors: dict[str, Tensor] = {}
    body = json.dumps({"identity": identity_of(config, data), "state": _pack(state, tensors)})
    header = json.dumps({"digest": _digest(body, tensors), "body": body})
    with replacing(path) as part:
        part.touch(mode=0o600)
        try:
            save_file(tensors, part, {"dpformer-checkpoint": header})
        except SafetensorError as error:
            raise OSError(str(error)) from None


def load_checkpoint(path: Path, *, config: str, data: str | None = None) -> dict[str, Any]:
    """Load the saved state; a file that is torn, altered, or from another config, data set or version is refused.

    `data` None postpones the check of the data (`check_data`).
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["dpformer-checkpoint"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _digest(header["body"], tensors) != header["digest"]:
            raise ValueError("its content was altered")
        body = json.loads(header["body"])
        found, state = body["identity"], _unpack(body["state"], tensors)
        if not isinstance(found, dict) or not isinstance(state, dict):
            raise ValueError("it lacks parts of a checkpoint")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DpformerError(
            f"{path} is not an intact dpformer checkpoint ({' '.join(str(error).split())[:200]}); this run cannot be "
            "resumed: start a new one with another --out"
        ) from None
    check_identity(path, found, identity_of(config, found.get("data") if data is None else data))
    return {**state, "data": found.get("data")}


def check_data(path: Path, saved: str, found: str) -> None:
    """Refuse data other than the saved run's: resuming with it would spend the budget on two data sets."""
    if saved != found:
        raise DpformerError(
            f"{path} was made with other data (split {saved[:12]}…, now {found[:12]}…); restore the original data, or "
            "start again with another --out"
        )


def identity_of(config: str, data: str | None) -> dict[str, Any]:
    versions = {"dpformer": dpformer.__version__, "torch": torch.__version__}
    return {"format": FORMAT, **versions, "config": config, "data": data}


def check_identity(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("format", "dpformer", "torch"):
        if found.get(name) != expected[name]:
            raise DpformerError(
                f"{path} was made with {name} {found.get(name)}, this is {expected[name]}; resume with that version"
            )
    if found.get("config") != expected["config"]:
        raise DpformerError(
            f"{path} was made with another config; restore config.toml, or start again with another --out"
        )
    check_data(path, str(found.get("data")), str(expected["data"]))


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; each tensor is replaced by a number. Keys of dicts keep their type."""
    if isinstance(value, Tensor):
        name = f"{len(tensors):06d}"
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(item, tensors) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be part of a checkpoint")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content].clone()  # otherwise a view of the file
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def _digest(body: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(body.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
