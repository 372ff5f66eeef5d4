"""Strange files for every reader of dpformer: `python -m fuzz TARGET --seconds 60` (needs `pip install atheris`).

`targets` has a table of readers, `seeds` valid files to start from. The normal tests drive the same table with
hypothesis (tests/fuzz), so that atheris is needed only to search by coverage.
"""
