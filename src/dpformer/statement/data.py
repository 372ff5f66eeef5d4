"""Sentences of the privacy statement about the data: the choices made before training.

The statement is published, so nothing in it is counted, apart from N and the vocabulary, which it names as public.
"""

from typing import Any

from dpformer.accounting.units import UNITS
from dpformer.format_number import plain, small


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
        "The log is the result of an SQL query (see config.toml). The guarantee holds if the query makes each user's "
        "rows from that user's rows alone; a filter by item frequency, for example, violates this.",
    ]


_BOUNDS = {"since": "from", "until": "before"}


def _filters(filters: dict[str, Any]) -> list[str]:
    sentences = []
    if filters.get("where"):
        sentences.append(f"Only interactions with {filters['where']} were used (a condition on each row by itself).")
    if filters.get("since") or filters.get("until"):
        bounds = [f"{word} {filters[name]}" for name, word in _BOUNDS.items() if filters.get(name)]
        sentences.append(f"Only interactions {' and '.join(bounds)} were used.")
    if filters.get("event_weights"):
        weights = filters["event_weights"].replace("=", " = ").replace(",", ", ")
        sentences.append(
            f"Interactions were weighted by their {filters['event_column'] or 'event'} ({weights}): a pair of items "
            "counts with the weight of the later one. Weights do not change the bound on one user's contribution."
        )
    if filters.get("session_gap"):
        sentences.append(
            f"Only pairs of items without a pause of more than {filters['session_gap']} between them were counted. All "
            "sessions of a user are protected together."
        )
    if filters["min_rating"] is not None:
        sentences.append(f"Interactions rated below {filters['min_rating']:g} were dropped.")
    if filters["min_user_actions"] > 1:
        sentences.append(f"The interactions of users with fewer than {filters['min_user_actions']} were dropped.")
    return sentences


def _vocabulary(description: dict[str, Any]) -> str:
    vocabulary, size = description["vocabulary"], f"{description['items']:,} items"
    left_out = " Interactions with other items, if any, were dropped."
    if vocabulary["policy"] == "catalog":
        known = "Its titles and attributes are assumed public: they must not be derived from users' actions."
        return f"The vocabulary of {size} is a public catalogue. {known}{left_out}"
    if vocabulary["policy"] == "dp":
        price = vocabulary["release"]
        return (
            f"The vocabulary of {size} was released from the data with differential privacy: items whose popularity, "
            f"with noise of standard deviation {plain(price['noise_multiplier'])}, is above "
            f"{plain(price['threshold'])}, from at most {price['max_items']:,} items per user. An item of a single "
            f"user is among them with a probability of at most {small(price['delta'])}, which is part of δ.{left_out}"
        )
    return (
        f"The vocabulary of {size} was taken from the data and is assumed public: the guarantee does not cover which "
        "items occur."
    )


def _length(longest: int | None) -> str:
    if longest is None:
        return "One user is one sequence; all items of a user are used for training."
    return f"One user is one sequence; the last {longest:,} items of a user are used for training."


def _split(split: dict[str, Any]) -> str:
    if split.get("until"):
        return (
            f"Interactions from {split['until']} onwards are held out, and the first one of each user is tested. Exact "
            "metrics on held-out items are not covered by the guarantee."
        )
    held_out = "last two items (validation, test) are" if split["validation"] else "last item is"
    return (
        f"For every user with at least 3 items, the {held_out} held out; other users are used for training only. Exact "
        "metrics on held-out items are not covered by the guarantee."
    )


def order_line(description: dict[str, Any]) -> str:
    """How a log was read, as one line for the person who trains; computed from the data, so not for publication."""
    if "order" not in description:
        return ""
    by = "file order" if description["order"] == "file" else f"by {description['time_column']}"
    state = f", snapshot {description['snapshot']}" if description.get("snapshot") else ""
    line = f"{description['source']} ({description['format']}{state}): histories are ordered {by}"
    if description["duplicates"]:
        line += f"; {description['duplicates']:,} exact duplicate rows are kept"
    if description["skipped"]:
        line += "; rows skipped: " + ", ".join(f"{count:,} ({why})" for why, count in description["skipped"].items())
    return line


def text_statement(description: dict[str, Any]) -> list[str]:
    """Sentences on unit, vocabulary, length, split and N; only N is counted."""
    unit, length = UNITS[description["unit"]], f"{description['max_length']:,}"
    split = (
        "The last tenth of the file is held out; the position of the cut is assumed public."
        if description["unit"] == "chunk"
        else f"About a tenth of the {unit.plural} is held out, by a keyed hash of each one's id (or text, if there is "
        "no id); held-out ones count in N without being used for training."
    )
    return [
        f"{unit.meaning} Its last {length} tokens, at most, are used for training.",
        description["tokens"],
        f"{split} Losses on held-out text are not covered by the guarantee.",
        _population(unit.plural, description),
    ]


def _population(plural: str, description: dict[str, Any]) -> str:
    number = f"The number of {plural}, N = {description['users']:,},"
    if description["users_declared"]:
        return f"{number} was declared before the data was read, and does not depend on the data."
    return f"{number} counts all {plural} in the data, before any filter, and is assumed public."
