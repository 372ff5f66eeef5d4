"""Catalogues: formats, columns as attributes, alignment with the data, what is dropped."""

from pathlib import Path

import duckdb
import pytest

from dpformer.data import Attributes, Dataset, Vocabulary, read_catalog
from dpformer.errors import DpformerError

CSV = 'item_id,title,genre,price,year\n7,The Cat,Comedy|Drama,1.5,1990\n8,A Cat,Comedy,2.5,1990\n9,"Dog, the",,,1991\n'


def attributes_of(catalog: Vocabulary, item: int) -> set[tuple[str, str]]:
    known = catalog.attributes
    assert known is not None
    return {known.names[link] for link in known.links[known.offsets[item] : known.offsets[item + 1]]}


def written(folder: Path, kind: str) -> Path:
    path = folder / f"items.{kind}"
    source = folder / "source.csv"
    source.write_text(CSV)
    if kind == "csv":
        path.write_text(CSV)
    elif kind == "tsv":
        path.write_text(
            "\n".join("\t".join(line.split(",")) for line in CSV.replace('"Dog, the"', "Dog the").split("\n"))
        )
    else:
        listed = "SELECT item_id, title, string_split(genre, '|') AS genre, price, year"
        form = "PARQUET" if kind == "parquet" else "JSON"
        duckdb.sql(f"COPY ({listed} FROM read_csv('{source}')) TO '{path}' (FORMAT {form})")
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
def test_columns_are_attributes(tmp_path: Path, kind: str) -> None:
    catalog = read_catalog(written(tmp_path, kind))
    assert list(catalog.ids) == ["7", "8", "9"] and catalog.title(0) == "The Cat" and catalog.policy == "catalog"
    assert attributes_of(catalog, 0) == {("genre", "Comedy"), ("year", "1990"), ("title", "cat"), ("title", "the")}
    assert attributes_of(catalog, 1) == {("genre", "Comedy"), ("year", "1990"), ("title", "cat")}
    assert attributes_of(catalog, 2) == {("title", "the")}, "Drama, 1991 and dog are of one item only"


def test_words_of_titles_may_be_left_out(tmp_path: Path) -> None:
    catalog = read_catalog(written(tmp_path, "csv"), title_words=False)
    assert attributes_of(catalog, 0) == {("genre", "Comedy"), ("year", "1990")}


def test_prices_are_cut_into_classes(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("id,price\n" + "".join(f"{i},{i + 0.5}\n" for i in range(100)))
    catalog = read_catalog(path)
    assert catalog.attributes is not None and len(catalog.attributes) == 10
    assert attributes_of(catalog, 0) == attributes_of(catalog, 9) != attributes_of(catalog, 10)


def test_lists_written_into_csv(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("item_id,tags\n1,\"['a', 'b']\"\n2,\"['b', 'a']\"\n3,[x\n")
    assert attributes_of(read_catalog(path), 0) == {("tags", "a"), ("tags", "b")}


def test_ids_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("item_id,title\n007,Bond\n7,Seven\n")
    assert list(read_catalog(path).ids) == ["007", "7"]


def test_without_other_columns_there_are_no_attributes(tmp_path: Path) -> None:
    path = tmp_path / "items.txt"
    path.write_text("3\n7\n")
    assert read_catalog(path).attributes is None


def test_pairs_of_attributes() -> None:
    rows = [[("genre", "Comedy"), ("year", "1990"), ("title", "cat")]] * 2 + [[("genre", "Comedy"), ("title", "cat")]]
    found = Attributes.of_items(rows).with_pairs()
    assert ("genre and year", "Comedy and 1990") in found.names and len(found) == 4, "words take no part"
    assert found.num_items == 3 and len(found.links) == 4 + 4 + 2


def test_attributes_follow_the_vocabulary(tmp_path: Path) -> None:
    catalog = read_catalog(written(tmp_path, "csv"))
    dataset = Dataset.from_histories([[0, 1, 2]], 10).with_attributes(catalog)
    assert dataset.vocabulary.attributes is not None
    assert attributes_of(dataset.vocabulary, 8) == attributes_of(catalog, 1)
    assert attributes_of(dataset.vocabulary, 0) == set()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("item_id,a\n1,x\n1,y\n", "twice"), ("a,b\n1,2\n", "no header with item_id"), ("item_id,a\n,x\n", "no item_id")],
)
def test_bad_catalogues(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "items.csv"
    path.write_text(text)
    with pytest.raises(DpformerError, match=sentence):
        read_catalog(path)
