"""The errors a user can cause, each one sentence with the value seen and the fix."""


class DpformerError(Exception):
    """Bad input: the command line prints the sentence and exits with code 2, without a traceback."""


class MissingExtra(DpformerError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'dpformer[{extra}]'")
