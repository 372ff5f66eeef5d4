"""What noise costs a parameter, beside `torch.randn`, in one run and in turns, on one thread.

    python -m benchmarks.noise          # the table "noise" of docs/results/speed.md

CPU time, the best of many turns: what else happens on a machine only makes one slower.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.page import RESULTS, put
from dpformer.kernels import native
from dpformer.noise import SecureRandom
from dpformer.noise.fingerprint import Fingerprint
from dpformer.noise.noisy_sums import Numbers, Piece, Release, release_sum

NUMBERS = 1 << 22


def contenders() -> dict[str, Callable[[], object]]:
    random, sums = SecureRandom("benchmark"), torch.zeros(NUMBERS)
    room, weights = torch.empty(NUMBERS, dtype=torch.float64), torch.randn(NUMBERS)
    fingerprint = Fingerprint(random)

    def release() -> Tensor:
        release_sum(sums.zero_(), Numbers(random, 0, 0, NUMBERS), 1.0, 100.0)
        return sums

    def in_float64() -> None:
        Release(1.0, 100.0).wide(Piece(sums.zero_(), Numbers(random, 0, 0, NUMBERS), 0, NUMBERS))

    def in_python(run: Callable[[], object]) -> Callable[[], None]:
        def without() -> None:
            kept, native.kernels = native.kernels, None
            try:
                run()
            finally:
                native.kernels = kept

        return without

    def hashed() -> str:
        return fingerprint([weights])

    return {
        "`torch.randn`, float32, not secure": lambda: torch.randn(NUMBERS),
        "`torch.randn`, float64, not secure": lambda: torch.randn(NUMBERS, dtype=torch.float64),
        "secure normal numbers in float64": lambda: random.fill_normal(room, step=0),
        "the same, added to a sum, rounded to the public grid, divided": in_float64,
        "decided in float32 where that decides: what a step does": release,
        "the same without compiled code": in_python(release),
        "fingerprint of the sums": hashed,
        "the same without compiled code, of the sums": in_python(hashed),
    }


def measure(turns: int) -> dict[str, float]:
    """Nanoseconds a number."""
    best: dict[str, float] = {}
    for _ in range(turns):
        for name, run in contenders().items():
            start = time.process_time_ns()
            run()
            best[name] = min(best.get(name, float("inf")), (time.process_time_ns() - start) / NUMBERS)
    return best


def table(found: dict[str, float]) -> str:
    lines = ["| | ns per parameter | ratio to `torch.randn` |", "| --- | --- | --- |"]
    plain = next(iter(found.values()))
    lines += [f"| {name} | {cost:.1f} | {cost / plain:.1f} |" for name, cost in found.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    torch.set_num_threads(1)
    found = table(measure(parser.parse_args().turns))
    print(found)
    put("noise", found, RESULTS / "speed.md")


if __name__ == "__main__":
    main()
