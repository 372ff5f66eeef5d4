"""What `evaluate` measured of a run, kept in its folder so that `report` need not measure it again.

Ranks of users' held-out items are as private as the data: they are in checkpoint/, readable by the owner alone, and are
used for the same model, the same data and the same split only.
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
        """What was kept of the same facts, if anything."""
        try:
            with np.load(self.folder.evaluation, allow_pickle=False) as file:
                if str(file["key"]) != self._key(facts):
                    return None
                return {name: file[name] for name in file.files if name != "key"}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None  # none, or not whole: it is measured again

    def put(self, arrays: dict[str, np.ndarray], *facts: str) -> None:
        """Keeps arrays instead of what was there. A folder that cannot be written to keeps nothing."""
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
