"""The fixtures of `tests/training`, for whole runs."""

from tests.training.conftest import log, tiny  # noqa: F401
from tests.training.memo import accountant_remembers  # noqa: F401
