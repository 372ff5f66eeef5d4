"""A shop's log as the guide's story assumes it: views and purchases of five months, and a public catalogue.

People have a favourite category, look at neighbouring items, come back to some, and buy some of what they see.
"""

import csv
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

CATEGORIES = ("Shoes", "Shirts", "Bags", "Hats")
ITEMS, USERS = 80, 3000
START = datetime(2026, 1, 5)


def write_catalog(path: Path) -> None:
    """80 items in four categories, of ten brands."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["item_id", "title", "category", "brand", "price"])
        for item in range(ITEMS):
            category = CATEGORIES[item % 4]
            rows.writerow([f"SKU-{item}", f"{category} no. {item}", category, f"Brand {item % 10}", 10 + item])


def write_log(path: Path, until: datetime, users: int = USERS) -> None:
    """All events before a moment; a later moment gives the same log with more rows."""
    rng = np.random.default_rng(7)
    rows: list[tuple[datetime, str, str, str]] = []
    for user in range(users):
        at = START + timedelta(days=float(rng.uniform(0, 140)))
        favourite, item = int(rng.integers(4)), int(rng.integers(ITEMS))
        for _ in range(int(rng.integers(3, 30))):
            at += timedelta(hours=float(rng.exponential(60)))
            near = rng.random()
            if near < 0.6:
                item = (item + 4) % ITEMS
            elif near < 0.9:
                item = 4 * int(ITEMS // 4 * rng.random() ** 2) + favourite
            event = "purchase" if rng.random() < 0.3 else "view" if rng.random() < 0.95 else "search"
            rows.append((at, f"c{user}", f"SKU-{item}", event))
    with path.open("w", newline="", encoding="utf-8") as file:
        written = csv.writer(file)
        written.writerow(["customer_id", "item_id", "event", "created_at"])
        for at, user, item, event in sorted(rows):
            if at < until:
                written.writerow([user, "" if event == "search" else item, event, f"{at:%Y-%m-%d %H:%M:%S}"])


if __name__ == "__main__":
    write_catalog(Path("items.csv"))
    write_log(Path("shop.csv"), datetime(2026, 6, 8))
    write_log(Path("shop-2.csv"), datetime(2026, 6, 15))
