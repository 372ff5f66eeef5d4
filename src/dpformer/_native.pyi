from typing import Any

Array = Any  # whatever has the buffer protocol; NumPy's arrays here

def release(
    words: Array,
    sums: Array,
    again: Array,
    first: int,
    a: float,
    least: float,
    most: float,
    most_sum: float,
    per_grid: float,
    divisor: float,
    /,
) -> int: ...
def hash_arrays(arrays: list[Array], keys: Array, hashes: Array, width: int, /) -> int: ...
def sums_of_words(arrays: list[Array], /) -> tuple[list[int], bool]: ...
def squares_of_rows(arrays: list[Array], squares: Array, /) -> None: ...
def measure_rows(lefts: list[Array], rights: list[Array | None], out: Array, /) -> None: ...
def write_products(
    left: Array, right: Array, out: Array, squares: Array, told: Array = ..., reach: float = ..., /
) -> bool: ...
def norm_sums(x: Array, grad: Array, scaled: Array, summed: Array, eps: float, /) -> None: ...

multiplies: int
