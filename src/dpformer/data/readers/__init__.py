"""Readers, one format per file: each makes a `Relation`, the SQL that DuckDB runs to read a log."""
