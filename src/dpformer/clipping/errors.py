"""What the engine refuses."""


class UnsupportedUse(RuntimeError):
    """A trainable parameter is used in a way for which there is no exact per-user rule.

    The message names the parameter, the function and the fix. Raising is the point: a use that were skipped, or whose
    rows were given to the wrong user, would release more of a user than the privacy statement says.
    """


class CannotBatch(UnsupportedUse):
    """What torch cannot compute for all users together; one user at a time it may be possible (fallback.py)."""
