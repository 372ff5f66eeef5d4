"""Sums of the queries over all users, by NumPy, DuckDB or Spark: the same whole numbers from each."""
