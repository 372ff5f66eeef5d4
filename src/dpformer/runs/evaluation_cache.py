"""Cached results of `evaluate` in a run folder, so that `report` need not repeat the evaluation.

Ranks of users' held-out items are as private as the data: they are stored in checkpoint/, readable by the owner alone,
and reused only for the same model, data and split.
"""

import hashlib
import zipfile

import numpy as np

from dpformer.errors import DpformerError
from dpformer.files import replacing
from dpformer.runs.folder import RunFolder
from dpformer.runs.model_file import sha256_of


class EvaluationCache:
    """Arrays under a key: the model's hash and whatever else they depend on."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def get(self, *facts: str) -> dict[str, np.ndarray] | None:
        """The arrays stored for these facts, if any."""
        try:
            with np.load(self.folder.evaluation, allow_pickle=False) as file:
                if str(file["key"]) != self._key(facts):
                    return None
                return {name: file[name] for name in file.files if name != "key"}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None  # missing or damaged: evaluate again

    def put(self, arrays: dict[str, np.ndarray], *facts: str) -> None:
        """Replace the cached arrays. A folder that is not writable caches nothing."""
        if not self.folder.private.is_dir():
            return
        try:
            with replacing(self.folder.evaluation) as part:
                part.touch(mode=0o600)
                with part.open("wb") as file:
                    np.savez(file, key=np.array(self._key(facts)), **arrays)  # type: ignore[arg-type]
        except (OSError, DpformerError):
            return

    def _key(self, facts: tuple[str, ...]) -> str:
        return hashlib.sha256("\n".join(["ranks 1", sha256_of(self.folder.model), *facts]).encode()).hexdigest()
