"""Where rules are registered: `@rule(F.linear)` above a function whose parameters are named and ordered as torch's.

A call then binds as Python binds it, by position or by name, so `torch.matmul(other=w, input=x)` is x @ w. An argument
that the rule does not know is refused, never guessed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from dpformer.clipping.recording import Recorder
from dpformer.clipping.trees import tensors_of

Rule = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
SIGNATURES: dict[Any, inspect.Signature] = {}  # of the rules, without gate and function; the tests hold them to torch's

Run = TypeVar("Run", bound=Callable[..., Any])


def rule(*functions: Any) -> Callable[[Run], Run]:
    """Registers `run(gate, func, …)` as the rule of some torch functions, for real numbers."""

    def register(run: Run) -> Run:
        whole = inspect.signature(run)
        signature = whole.replace(parameters=list(whole.parameters.values())[2:])

        def bound(gate: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return run(gate, func, *args, **kwargs)
            except TypeError:
                _check_binding(gate, func, signature, args, kwargs)
                raise

        for function in functions:
            RULES[function], SIGNATURES[function] = bound, signature
        return run

    return register


def _check_binding(
    gate: Recorder, func: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameter = next(t for t in tensors_of(args, kwargs) if gate.is_managed(t))
        raise gate.refusal(parameter, func, f"call it as {signature} ({error})") from None
