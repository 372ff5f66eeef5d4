"""What the privacy statement has to say about the data: the choices made before training, in sentences.

The statement is published, so apart from N and the vocabulary, which it names as public, nothing in it is counted.
"""

from typing import Any

from dpformer.accounting.units import UNITS
from dpformer.format_number import plain


def data_statement(description: dict[str, Any]) -> list[str]:
    """Sentences on filters, vocabulary, sequences and N, from `Dataset.description`."""
    return [
        *_query(description.get("query", False)),
        *_filters(description["filters"]),
        _vocabulary(description),
        _length(description["max_length"]),
        _split(description["split"]),
        _population("users", description),
    ]


def _query(asked: bool) -> list[str]:
    if not asked:
        return []
    return [
        "The log is what an SQL query (see config.toml) made of the data. The guarantee holds if it makes each user's "
        "rows of that user's rows alone: a filter by how often an item occurs, say, does not."
    ]


_BOUNDS = {"since": "from", "until": "before"}


def _filters(filters: dict[str, Any]) -> list[str]:
    sentences = []
    if filters.get("where"):
        sentences.append(f"Only interactions with {filters['where']} count: a condition on each row by itself.")
    if filters.get("since") or filters.get("until"):
        bounds = [f"{word} {filters[name]}" for name, word in _BOUNDS.items() if filters.get(name)]
        sentences.append(f"Only interactions {' and '.join(bounds)} count.")
    if filters["min_rating"] is not None:
        sentences.append(f"Interactions rated below {filters['min_rating']:g} were left out.")
    if filters["min_user_actions"] > 1:
        sentences.append(f"The interactions of users with fewer than {filters['min_user_actions']} were left out.")
    return sentences


def _vocabulary(description: dict[str, Any]) -> str:
    vocabulary, size = description["vocabulary"], f"{description['items']:,} items"
    left_out = " Interactions with other items, if any, were left out."
    if vocabulary["policy"] == "catalog":
        known = "Titles and attributes of items in it are taken as public: they must not be made from what users did."
        return f"The vocabulary of {size} is a public catalogue. {known}{left_out}"
    if vocabulary["policy"] == "dp":
        price = vocabulary["release"]
        return (
            f"The vocabulary of {size} was released from the data with differential privacy: items whose popularity, "
            f"with noise of standard deviation {plain(price['noise_multiplier'])}, is above "
            f"{plain(price['threshold'])}, of at most {price['max_items']:,} items a user. That an item of one user "
            f"alone is among them has a probability of at most {plain(price['delta'], 2, up=True)}, which is part of "
            f"δ.{left_out}"
        )
    return (
        f"The vocabulary of {size} was taken from the data and is assumed public: the guarantee does not cover which "
        "items occur."
    )


def _length(longest: int | None) -> str:
    if longest is None:
        return "One user is one sequence; all items of a user are trained on."
    return f"One user is one sequence; the last {longest:,} items of a user are trained on."


def _split(split: dict[str, Any]) -> str:
    if split.get("until"):
        return (
            f"Interactions from {split['until']} on are held out, and the first of each user is what is tested. Exact "
            "metrics on held-out items are not covered by the guarantee."
        )
    held_out = "last two items (validation, test) are" if split["validation"] else "last item is"
    return (
        f"Of every user with at least 3 items the {held_out} held out; users with fewer train only. Exact metrics on "
        "held-out items are not covered by the guarantee."
    )


def order_line(description: dict[str, Any]) -> str:
    """How a log was read, for whoever trains on it; it is made from the data, so not for publishing. Empty for text."""
    if "order" not in description:
        return ""
    by = "as in the file" if description["order"] == "file" else f"by {description['time_column']}"
    line = f"{description['source']} ({description['format']}): histories are ordered {by}"
    if description["duplicates"]:
        line += f"; {description['duplicates']:,} exact duplicate rows are kept"
    if description["skipped"]:
        line += "; rows left out: " + ", ".join(f"{count:,} ({why})" for why, count in description["skipped"].items())
    return line


def text_statement(description: dict[str, Any]) -> list[str]:
    """Sentences on unit, vocabulary, length, split and N for the privacy statement; nothing in it is counted but N."""
    unit, length = UNITS[description["unit"]], f"{description['max_length']:,}"
    split = (
        "The last tenth of the file is held out; where the cut falls is assumed public."
        if description["unit"] == "chunk"
        else f"About a tenth of the {unit.plural} is held out, each by a keyed hash of its own id, or text where there "
        "is no id, and counts in N with nothing to train on."
    )
    return [
        f"{unit.meaning} At most {length} tokens of it, the last ones, are trained on.",
        description["tokens"],
        f"{split} Losses on held-out text are not covered by the guarantee.",
        _population(unit.plural, description),
    ]


def _population(plural: str, description: dict[str, Any]) -> str:
    number = f"The number of {plural}, N = {description['users']:,},"
    if description["users_declared"]:
        return f"{number} was declared before the data was read, which has no influence on it."
    return f"{number} counts all that the data names, before any filter, and is assumed public."
