"""The list of contenders: a name and a function that sets up a model and returns what does one logical step."""

from collections.abc import Callable

import numpy as np

from benchmarks.workloads import Workload

Step = Callable[[], None]
Make = Callable[[Workload, list[np.ndarray]], Step]
CONTENDERS: dict[str, Make] = {}


def contender(name: str) -> Callable[[Make], Make]:
    """Puts a function on the list."""

    def register(make: Make) -> Make:
        CONTENDERS[name] = make
        return make

    return register
