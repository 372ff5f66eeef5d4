"""Search by beginnings of words."""

import numpy as np

from dpformer.serving.search import Search, folded

NAMES = ["Alien (1979)", "Aliens (1986)", "Amélie (2001)", "My Alien, Too", "", "100%"]


def test_folding() -> None:
    assert folded("  Amélie (2001)! ") == "amelie 2001" and folded("STRASSE ß") == "strasse ss" and folded("%") == ""


def test_every_word_begins_a_word_and_the_popular_come_first() -> None:
    search = Search(NAMES, np.array([1.0, 5.0, 2.0, 9.0, 0.0, 0.0]))
    assert search.find("alien", 10) == [1, 0, 3]  # those that begin with it, by popularity; then others
    assert search.find("alien 19", 10) == [0, 1] or search.find("alien 19", 10) == [1, 0]
    assert search.find("amel", 10) == [2] and search.find("lien", 10) == [] and search.find("alien", 1) == [1]
    assert search.find("", 2) == [3, 1] and search.find("100", 9) == [5]
    assert Search(NAMES, None).find("", 3) == [0, 1, 2]


def test_ids_are_found_where_there_are_titles() -> None:
    search = Search(NAMES, np.arange(6.0), ["SKU-1", "SKU-12", "SKU-2", "alien", "x", "SKU 1"])
    assert search.find("SKU-1", 10) == [0, 5, 1]  # this very id first
    assert search.find("alien", 10) == [3, 1, 0] and search.find("sku 12 aliens", 10) == [1]
    assert search.find("amel 2", 10) == [2]
