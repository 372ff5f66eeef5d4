"""Sums of the queries over all users, by NumPy, DuckDB or Spark: all give the same integers."""
