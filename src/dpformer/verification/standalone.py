"""Check a published run folder without dpformer: one file, only Python and numpy.

    python standalone.py RUN [--key public.pem] [--json]

Written independently of dpformer's own code, it imports none of it and has its own accountant, so that mistakes there
are not repeated here: privacy loss distributions of adding and removing one user, on a grid that connects the dots
(Doroshenko et al. 2022), composed by FFT; Rényi accounting for searches (Papernot and Steinke 2022). Truncation and
rounding errors are added to δ, so that every value is an upper bound. Every claim is reported as checked, contradicted,
or not checked. No published file can show that the noise was drawn as stated and nothing else written into the weights:
that needs data and key (`dpformer verify --replay`). Exit code 0: no contradiction; 1: contradicted; 2: bad input.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MOST_JSON, MOST_HEADER, MOST_STEPS = 2**22, 2**26, 10**6  # bounds the work that an untrusted folder can cause
CLOSE = 2e-3  # relative: a stated bound may be this much below ours, which is an upper bound on another grid
ROUNDING, TAIL = 1e-15, 1e-16  # of δ: error of an FFT per composition, and truncated mass
PRIVATE = ("state.safetensors", "keys.json", "budget.json")
TITLE = b"# The published files of a run of dpformer\n"
TENSORS = {"vocabulary", "titles", "frequencies", "attributes"}
ASSUMED = "is assumed, not checked"  # in the label of an event: the headline has to say it
HEADLINE = r"(\w+)-level differential privacy: ε = ([\d.,]+), δ = ([\d.e-]*\d), under adding or removing [^.;]+\.(.*)"
UNSEEN = (  # claims for which no published file is evidence
    ("the noise was drawn, and nothing but noisy sums is in the model", "dpformer verify --replay, with data and key"),
    ("N, and that one id is one person", "known to the owner of the data alone"),
    ("the other fields and sentences of privacy.json", "dpformer verify rebuilds them; they are not read here"),
    ("cards, audit.json and added files", "written by the publisher; they are not read here"),
)


class BadInput(Exception):
    """Bad input, explained in one sentence."""


class Line(NamedTuple):
    """A claim and its finding: right (True), contradicted (False), not checked (None)."""

    claim: str
    ok: bool | None
    found: str


# The accountant.

_erfc = np.frompyfunc(math.erfc, 1, 1)


def _between(edges: np.ndarray) -> np.ndarray:
    """P(a < Z ≤ b) of a standard normal variable for neighbouring edges, without loss of digits in either tail."""
    above, below = (np.asarray(_erfc(sign * edges / math.sqrt(2)), dtype=float) / 2 for sign in (1, -1))
    return np.where(edges[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])


class Event(NamedTuple):
    """Gaussian releases of sensitivity 1, each of users who take part with probability q."""

    sigma: float
    q: float
    releases: int
    failure: float = 0.0  # δ that all of them spend outright

    @property
    def sampled(self) -> bool:
        return self.q < 1

    def losses(self, h: float, removed: bool) -> tuple[int, np.ndarray]:
        """For one release: the probabilities of losses h·first, h·(first + 1), …; the rest is infinite loss."""
        sigma, q, nothing = self.sigma, self.q, math.log1p(-self.q) if self.q < 1 else -math.inf

        def loss(x: float) -> float:  # ln(1 − q + q·e^{(2x − 1)/(2σ²)})
            return float(np.logaddexp(nothing, math.log(q) + (2 * x - 1) / (2 * sigma**2)))

        low = nothing if q < 1 else loss(-10 * sigma)
        first, last = math.floor(low / h), math.ceil(loss(1 + 10 * sigma) / h)
        grid, x = h * np.arange(first, last + 1), np.full(last + 1 - first, -np.inf)
        inside = np.expm1(grid) + q
        x[inside > 0] = sigma**2 * np.log(inside[inside > 0] / q) + 0.5  # the inverse of `loss`
        nobody, user = _between(x / sigma), _between((x - 1) / sigma)
        one = (1 - q) * nobody + q * user
        if not removed:  # the same losses with the roles exchanged
            first, grid, one, nobody = -last, -grid[::-1], nobody[::-1], one[::-1]
        # The mass of each interval goes to its ends, so that both hypotheses keep theirs.
        up = np.clip((one - nobody * np.exp(grid[:-1])) / -math.expm1(-h), 0, one)
        chances = np.zeros(len(grid))
        chances[1:] += up
        chances[:-1] += one - up
        return first, chances

    def renyi(self, order: float) -> float:
        """Rényi divergence of one release, by the trapezoidal rule: exact to rounding for smooth integrands."""
        sigma, q = self.sigma, self.q
        if q == 1:
            return order / (2 * sigma**2)
        x = np.linspace(-12 * sigma, order + 12 * sigma + 1, 20001)
        ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        terms = order * ratio - x**2 / (2 * sigma**2)
        total = np.exp(terms - terms.max()).sum() * (x[1] - x[0]) / (sigma * math.sqrt(2 * math.pi))
        return max(0.0, float(terms.max() + math.log(total)) / (order - 1))


def reach(each: Sequence[tuple[int, np.ndarray, int]], h: float, sign: int) -> float:
    """A loss of all releases together beyond which (Chernoff) there is less than `TAIL`."""
    found = []
    for order in np.logspace(-3, 4, 141):
        total = -math.log(TAIL)
        for first, chances, count in each:
            with np.errstate(divide="ignore"):
                terms = np.log(chances) + sign * order * h * (first + np.arange(len(chances)))
            total += count * float(terms.max() + np.log(np.exp(terms - terms.max()).sum()))
        found.append(total / order)
    return sign * min(found)


class Curve:
    """δ(ε) of all events together, in both directions; never below the truth."""

    def __init__(self, events: Sequence[Event], h: float) -> None:
        self.failure = sum(event.failure for event in events)
        self.sides = [self._side(events, h, removed) for removed in (True, False)]

    @staticmethod
    def _side(events: Sequence[Event], h: float, removed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses above 0, P[loss ≥ each], and E[e^−loss] over those."""
        each = [(*event.losses(h, removed), event.releases) for event in events]
        infinite = 1 - math.prod(min(1.0, chances.sum()) ** count for _, chances, count in each)
        low, high = reach(each, h, -1), reach(each, h, 1)
        size, first = 1 << max(10, math.ceil(math.log2((high - low) / h + 2))), math.floor(low / h)
        if size > 2**24:
            raise BadInput("the events of this statement exceed the limits of this verifier")
        product = np.ones(size // 2 + 1, dtype=complex)
        for start, chances, count in each:
            places = (start + np.arange(len(chances))) % size
            product *= np.fft.rfft(np.bincount(places, chances, size)) ** count
        together = np.roll(np.fft.irfft(product, size), -(first % size)).clip(0)
        grid = h * (first + np.arange(size))
        grid, together = grid[grid > 0], together[grid > 0]
        lost = max(0.0, infinite) + 2 * TAIL + ROUNDING * (10 + sum(count for *_, count in each))
        return grid, together[::-1].cumsum()[::-1] + lost, (together * np.exp(-grid))[::-1].cumsum()[::-1]

    def delta(self, epsilon: float) -> float:
        found = 0.0
        for grid, above, weighed in self.sides:
            place = int(np.searchsorted(grid, epsilon, side="right"))
            if place < len(grid):
                found = max(found, float(above[place] - math.exp(epsilon) * weighed[place]))
        return min(1.0, found + self.failure)

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, float(max(grid[-1] for grid, _, _ in self.sides))
        if self.delta(high) > delta:
            return math.inf
        while high - low > 1e-7 * high + 1e-12:
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high


ORDERS = [1 + k / 10 for k in range(1, 100)] + [*range(11, 64), 128, 256, 512]


def epsilon_by_renyi(divergences: Iterable[float], delta: float) -> float:
    """From divergences of `ORDERS` (Canonne, Kamath and Steinke 2020)."""
    pairs = zip(divergences, ORDERS, strict=True)
    return max(0.0, min(d + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for d, a in pairs))


def curve_of(events: Sequence[Event], delta: float) -> tuple[Curve, float]:
    """The curve on a grid fine enough for its ε at δ, and that ε."""
    if sum(event.releases for event in events) > MOST_STEPS:
        raise BadInput(f"the ledger holds more than the supported {MOST_STEPS:,} releases")
    precision = sum(event.releases / event.sigma**2 for event in events if not event.sampled)  # one Gaussian
    failure = sum(event.failure for event in events if not event.sampled)
    merged = [event for event in events if event.sampled]
    if precision:
        merged.append(Event(1 / math.sqrt(precision), 1.0, 1, failure))
    steps = sum(event.releases for event in merged)
    rough = epsilon_by_renyi([sum(e.releases * e.renyi(a) for e in merged) for a in ORDERS], delta)
    h = max(rough, 1e-3) * min(2e-3, 0.04 / math.sqrt(steps))
    curve = Curve(merged, h)
    best = curve.epsilon(delta)
    for _ in range(3):  # finer grids, until that no longer matters
        curve, coarse = Curve(merged, h := h / 3), best
        if (best := min(best, curve.epsilon(delta))) >= 0.9995 * coarse:
            break
    return curve, best


def epsilon_of_search(events: Sequence[Event], mean_runs: float, delta: float) -> float:
    """ε of the best of a random number of runs (logarithmic distribution; Papernot and Steinke 2022, theorem 2)."""
    low, high = -700.0, -1e-12  # range of ln γ, with E[K] = (1/γ − 1)/ln(1/γ)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.expm1(-middle) / -middle > mean_runs else (low, middle)
    once = [sum(e.releases * e.renyi(order) for e in events) for order in ORDERS]
    extra = min((1 - 1 / order) * d - low / order for order, d in zip(ORDERS, once, strict=True))
    more = math.log(mean_runs)
    return epsilon_by_renyi([d + extra + more / (a - 1) for d, a in zip(once, ORDERS, strict=True)], delta)


def most_found(curve: Callable[[float], float], highest: float, alarms: float) -> float:
    """The largest true positive rate of any attack at this false positive rate (Kairouz et al. 2015)."""
    points = [(e, curve(e)) for e in np.linspace(0, min(highest, 700), 400)]
    above = (math.exp(e) * alarms + d for e, d in points)
    return min(1.0, *above, *(1 - math.exp(-e) * max(0.0, 1 - d - alarms) for e, d in points))


# Reading untrusted files.


def read(path: Path, most: int = MOST_JSON) -> bytes:
    if not path.is_file() or path.stat().st_size > most:
        raise BadInput(f"{path} is not a file of at most {most:,} bytes")
    return path.read_bytes()


def strict_json(text: str | bytes) -> Any:
    """JSON without duplicate keys, in which every number is finite."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("an object has a duplicate key")
        return found

    return json.loads(text, object_pairs_hook=once, parse_constant=lambda name: float(f"no number: {name}"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(strict_json(read(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"{path} is not a valid JSON object: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """The lines `name = value` of config.toml before its first section; dpformer writes every value as JSON does."""
    found: dict[str, Any] = {}
    for line in read(path).decode("utf-8").split("\n"):
        if line.startswith("["):
            break
        if line and not line.startswith("#"):
            name, _, value = line.partition(" = ")
            if name in found:
                raise BadInput(f"{path}: {name[:60]!r} occurs twice")
            found[name] = math.inf if value == "inf" else strict_json(value)
    return found


def sha256(path: Path) -> str:
    if not path.is_file():  # reading a named pipe would block
        raise BadInput(f"{path.name} is not a file")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Tensors:
    """A safetensors file: every byte of it belongs to the header or to exactly one tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise BadInput(f"{path.name} is not a file")
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if length > MOST_HEADER:
                raise ValueError("its header is too long")
            header = strict_json(file.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.about, self.begin, end = header, 8 + length, 0
        for name, one in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            begin, stop = one["data_offsets"]
            if begin != end or stop - begin != math.prod(one["shape"]) * SIZES[one["dtype"]]:
                raise ValueError(f"bytes before or in {name[:60]!r} belong to no tensor")
            end = stop
        if self.begin + end != path.stat().st_size:
            raise ValueError("bytes at its end belong to no tensor")

    def doubles(self, name: str) -> np.ndarray:
        with self.path.open("rb") as file:
            file.seek(self.begin + self.about[name]["data_offsets"][0])
            return np.frombuffer(file.read(8 * math.prod(self.about[name]["shape"])), "<f8")


# Ed25519 (RFC 8032): verification only.

P = 2**255 - 19
GROUP, D = 2**252 + 27742317777372353535851937790883648493, -121665 * pow(121666, P - 2, P) % P
Point = tuple[int, int, int, int]


def _add(one: Point, other: Point) -> Point:
    a, b = (one[1] - one[0]) * (other[1] - other[0]) % P, (one[1] + one[0]) * (other[1] + other[0]) % P
    c, d = 2 * one[3] * other[3] * D % P, 2 * one[2] * other[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def _times(number: int, point: Point) -> Point:
    found: Point = (0, 1, 1, 0)
    while number:
        if number & 1:
            found = _add(found, point)
        point, number = _add(point, point), number >> 1
    return found


def _point(raw: bytes) -> Point:
    y = int.from_bytes(raw, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if y >= P or (x * x - square) % P or (not x and sign):
        raise ValueError("it is not a point of the curve")
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


BASE = _point((4 * pow(5, P - 2, P) % P).to_bytes(32, "little"))


def is_signed(message: bytes, signature: bytes, key: bytes) -> bool:
    """Whether the owner of the public key has signed this message."""
    if len(signature) != 64 or (s := int.from_bytes(signature[32:], "little")) >= GROUP:
        return False
    owner, nonce = _point(key), _point(signature[:32])
    h = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % GROUP
    left, right = _times(s, BASE), _add(nonce, _times(h, owner))
    return (left[0] * right[2] - right[0] * left[2]) % P == 0 and (left[1] * right[2] - right[1] * left[2]) % P == 0


def public_key(path: Path) -> bytes:
    """The 32 bytes of an Ed25519 key in PEM."""
    lines = read(path, 2**16).decode("ascii", "replace").split("\n")
    raw = base64.b64decode("".join(line for line in lines if not line.startswith("-----")))
    if len(raw) != 44 or raw[:12] != bytes.fromhex("302a300506032b6570032100"):
        raise BadInput(f"{path} is not a public Ed25519 key in PEM format")
    return raw[12:]


# The claims.


class Published:
    """A run folder as published."""

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self.folder, self.key = folder, key
        self.facts, self.config = read_json(folder / "privacy.json"), read_config(folder / "config.toml")
        if "truncated_gaussian" in str(self.facts.get("events")):
            raise BadInput("this verifier has no accountant for batches of a bounded size: use dpformer verify")
        self.private = self.facts.get("epsilon") is not None

    def lines(self) -> list[Line]:
        claims: list[tuple[str, Callable[[], tuple[bool | None, str]]]] = [
            ("ε follows from the ledger", self.arithmetic),
            ("the bound on attacks follows from the ledger", self.attacks),
            ("the ledger is what config.toml asks for", self.ledger),
            ("the headline says no less than ε and δ", self.headline),
            ("the files are those of the statement", self.hashes),
            ("the model file has the parts of a model and no other bytes", self.model_file),
            ("the key of the random numbers cannot be guessed", self.commitment),
            ("no secret was left in the folder", self.secrets),
            ("the owner of a certain key published it", self.signature),
        ]
        found = []
        for claim, check in claims:
            try:
                found.append(Line(claim, *check()))
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, BadInput) as error:
                found.append(Line(claim, False, " ".join(f"cannot be read: {error!r}".split())[:200]))
        return found + [Line(claim, None, how) for claim, how in UNSEEN if self.private]

    def events(self, described: Iterable[dict[str, Any]]) -> list[Event]:
        found: list[Event] = []
        for one in described:
            sigma, kind = one["noise_multiplier"], one["kind"]
            if not 0.05 <= sigma < math.inf or len(found) > 8:
                raise ValueError(f"noise of {sigma}, or this many events, exceed the limits of this verifier")
            if one["private"] is not self.facts["private"]:
                raise ValueError("the noise of an event was seeded, but the statement claims a private run")
            if kind == "gaussian":
                event = Event(sigma, 1.0, one["count"], one["count"] * float(one["delta"]))
            elif kind in ("poisson_gaussian", "banded_gaussian"):
                bands = one.get("bands", 1)
                event = Event(sigma, min(1.0, bands * one["sample_rate"]), -(-one["steps"] // bands))
            else:
                raise ValueError(f"an event of the kind {kind!r} is unknown")
            if type(event.releases) is not int or event.releases < 1 or not 0 < event.q <= 1 or event.failure < 0:
                raise ValueError(f"{one} is not an event")
            found.append(event)
        return found

    @cached_property
    def own(self) -> tuple[float, Callable[[float], float] | None]:
        """Our bound on ε, and our curve δ(ε); None for a search."""
        delta, tuning = self.facts["delta"], self.facts.get("tuning")
        if tuning is None:
            events = self.events(self.facts["events"])
            curve, epsilon = curve_of(events, delta)
            return epsilon, curve.delta
        events = self.events(tuning["events"])
        if events[:-1] != self.events(self.facts["events"]):
            raise ValueError("the search repeats events other than those of this run")
        failing = any(event.failure for event in events)  # for which this verifier has no bound
        return math.inf if failing else epsilon_of_search(events, tuning["mean_runs"], delta), None

    def arithmetic(self) -> tuple[bool | None, str]:
        facts = self.facts
        if not self.private:
            return facts["events"] == [] and facts["private"] is False, "no noise, and no privacy is claimed"
        if not (0 < facts["delta"] < 1 and 0 < facts["epsilon"] < math.inf):
            return False, "ε and δ are not the numbers of a guarantee"
        own, _ = self.own
        target = math.inf if "tuning" in facts else facts["epsilon_target"]
        ok = own <= facts["epsilon"] * (1 + CLOSE) and facts["epsilon"] <= target * (1 + 1e-9)
        return ok, f"stated: {facts['epsilon']:.6g}; our bound: {own:.6g} at δ = {facts['delta']:.3g}"

    def attacks(self) -> tuple[bool | None, str]:
        if (stated := self.facts.get("attack")) is None:
            return not self.facts["private"], "none is stated"
        epsilon, curve = self.own
        if curve is None:
            return None, "not computed for a search"
        found, alarms = stated["true_positive_rate"], stated["false_positive_rate"]
        own = (1 - CLOSE) * most_found(curve, epsilon, alarms)
        right = ((value, float(prior)) for prior, value in stated["precision"].items())
        ok = found >= own and all(value >= p * own / (p * own + (1 - p) * alarms) for value, p in right)
        return ok, f"stated: {found:.4g} at {alarms:g}; our bound: {own:.4g}"

    def ledger(self) -> tuple[bool | None, str]:
        facts, config = self.facts, self.config
        users, wrong = facts["users"], []
        if not self.private:
            return config["epsilon"] == math.inf, "no noise was requested"
        pairs = [("epsilon", "epsilon_target"), ("delta", "delta")]
        training = [e for e in facts["events"] if e["kind"] in ("poisson_gaussian", "banded_gaussian")]
        if config["model"] != "counts":
            batch, epochs = config["batch_size"], config["epochs"]
            due = {"sample_rate": batch / users, "steps": -(-epochs * users // batch)}
            pairs += [("clip_norm", "clip_norm"), ("clipping", "clipping"), ("batch_size", "expected_batch_size")]
            if len(training) != 1:
                return False, f"{len(training)} training events; there must be one"
            noise = {name: training[0][name] for name in ("sample_rate", "steps", "noise_multiplier")}
            wrong += [name for name, value in noise.items() if facts[name] != value or due.get(name, value) != value]
            wrong += ["bands"] * (training[0].get("bands", 1) != config.get("bands", 1))
        elif training:
            return False, "there is a training event, but counts are not trained"
        wrong += [name for name, stated in pairs if name in config and config[name] != facts[stated]]
        labels = {event["label"].split(" (")[0] for event in facts["events"]}
        needed = {"transition counts" if config["model"] == "counts" else "training"} | (
            {"metrics"} if facts.get("metrics") or config.get("private_metrics") else set()
        )
        needed |= {"transition counts"} if config.get("warm_start") else set()
        wrong += [f"no event of {one}" for one in sorted(needed - labels)]
        wrong += ["users"] * (type(users) is not int or users < 1)
        wrong += ["unit"] * (facts["unit"] != config.get("unit", "user"))
        wrong += ["seed"] * ((config.get("seed") is None) != facts["private"])
        if config["task"] == "recommend" and "catalog" not in config and "file" in config:  # items are of the data
            if config["assume_items_public"]:
                wrong += ["given"] * ("given" not in facts)
            elif not any(e.get("delta") for e in facts["events"]):
                wrong.append("no event has released the item list")
        right = "steps, rates, bounds and labels; the calibration of σ is checked by dpformer"
        return not wrong, f"differs: {', '.join(wrong)}" if wrong else right

    def headline(self) -> tuple[bool | None, str]:
        said, facts = str(self.facts["headline"]), self.facts
        if not facts["private"]:
            return said.startswith("NOT PRIVATE"), said[:80]
        if (match := re.fullmatch(HEADLINE, said)) is None:
            return False, "it does not have the form that dpformer writes"
        level, epsilon, delta = match[1], float(match[2].replace(",", "")), float(match[3])
        ok = epsilon >= facts["epsilon"] and delta >= facts["delta"]
        ok &= level == facts["unit"].capitalize() and re.fullmatch(r"( ASSUMED: [^.]+\.)*", match[4]) is not None
        ok &= any(ASSUMED in event["label"] for event in facts["events"]) == ("ASSUMED" in said)
        return ok and ("given" in facts) == (", given " in said), f"ε = {epsilon:g}, δ = {delta:g}"

    def hashes(self) -> tuple[bool | None, str]:
        stated = self.facts["hashes"]
        if sha256(self.folder / "model.safetensors") != stated["model"]:
            return False, "model.safetensors does not match the statement"
        releases = self.folder / "releases.safetensors"
        if releases.exists() and Tensors(releases) and sha256(releases) != stated.get("releases"):
            return False, "releases.safetensors does not match the statement"
        return True, "model and releases; the hash of config.toml is compared by dpformer only"

    def model_file(self) -> tuple[bool | None, str]:
        file = Tensors(self.folder / "model.safetensors")
        odd = [name for name in file.about if not name.startswith("model.") and name not in TENSORS]
        if odd or file.metadata.keys() != {"dpformer"}:
            return False, f"it holds {(odd or sorted(file.metadata))[0][:60]!r}, which is not part of a model"
        about = strict_json(file.metadata["dpformer"])
        metadata = about["metadata"]
        if about.keys() != {"format", "model", "arguments", "metadata", "sha256"}:
            return False, "its header has other entries"
        shared = {"headline", "private", "epsilon", "delta", "versions"}
        odd = sorted(name for name in shared if metadata.get(name) != self.facts[name])
        if odd := odd + sorted(metadata.keys() - shared - {"text"}):
            return False, f"its metadata and the statement differ in {', '.join(odd)}"
        if self.private and "frequencies" in file.about:
            counts = file.doubles("frequencies") * self.facts["users"]
            clear = counts[counts > 1.5]
            if len(clear) >= 20 and (abs(clear - np.round(clear)) < 1e-6).mean() > 0.5:
                return False, "its frequencies are integers: there is no noise on them"
            if not {"frequencies", "items", "transition counts"} & {e["label"] for e in self.facts["events"]}:
                return False, "it holds frequencies that no event has paid for"
        return True, f"{len(file.about)} tensors; their values are not examined"

    def commitment(self) -> tuple[bool | None, str]:
        stated = self.facts.get("key_commitment")
        if stated is None:
            return None, "the statement commits to no key"
        guessable = [bytes(32), *(hashlib.sha256(f"dpformer seed {seed}".encode()).digest() for seed in range(1000))]
        known = {hashlib.sha256(b"dpformer run key commitment\n" + key).hexdigest() for key in guessable}
        ok = re.fullmatch("[0-9a-f]{64}", str(stated)) is not None
        return ok and (
            stated not in known or not self.facts["private"]
        ), "not the key of a seed below 1,000; a replay can confirm it"

    def secrets(self) -> tuple[bool | None, str]:
        left = [name for name in PRIVATE if (self.folder / "checkpoint" / name).exists()]
        return not left, f"checkpoint/{left[0]} allows removing the noise" if left else "none"

    def signature(self) -> tuple[bool | None, str]:
        sums, signature = self.folder / "SHA256SUMS", self.folder / "SHA256SUMS.sig"
        if self.key is None and not sums.exists():
            return None, "no --key was given, and there is no SHA256SUMS"
        text = read(sums)
        lines = [
            re.fullmatch(r"([0-9a-f]{64})  ([\w-][\w.-]*)", line) for line in text.decode("ascii").split("\n")[1:-1]
        ]
        listed = {match[2]: match[1] for match in lines if match}
        if len(listed) < len(lines) or not text.startswith(TITLE) or not text.endswith(b"\n"):
            return False, "SHA256SUMS is not a list of hashes"
        for name, expected in listed.items():
            if sha256(self.folder / name) != expected:
                return False, f"{name} is not the file that was signed"
        there = {path.name for path in self.folder.iterdir()} - {sums.name, signature.name}
        if unsigned := sorted(there - {".lock", "metrics.jsonl", "checkpoint", "report.html"} - listed.keys()):
            return False, f"{unsigned[0]} is not signed"
        if self.key is None:
            return None, "the hashes are right; --key checks whose they are"
        ok = is_signed(text, read(signature), self.key)
        return ok, "under every published file" if ok else "not made by the owner of this key"


def verdict(lines: Sequence[Line]) -> str:
    """A one-sentence verdict, which never claims more than was checked."""
    wrong, left = ("; ".join(line.claim for line in lines if line.ok is ok) for ok in (False, None))
    return f"CONTRADICTED: {wrong}." if wrong else f"Nothing contradicts the statement. NOT CHECKED: {left}."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check a published run of dpformer without dpformer.")
    parser.add_argument("run", type=Path, help="folder with privacy.json, config.toml and model.safetensors")
    parser.add_argument("--key", type=Path, help="public key (PEM, Ed25519) of the expected signer")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        run = Published(given.run, None if given.key is None else public_key(given.key))
    except (BadInput, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    lines = run.lines()
    said, passed = str(run.facts.get("headline")), all(line.ok is not False for line in lines)
    if given.json:
        found = {"passed": passed, "headline": said, "verdict": verdict(lines)}
        print(json.dumps({**found, "claims": [line._asdict() for line in lines]}, indent=2, ensure_ascii=False))
        return 0 if passed else 1
    for claim, ok, how in [*lines, Line("statement", None, said)]:
        shown = {True: "checked", False: "WRONG", None: "not checked"}[ok]
        print(f"{shown:12} {claim}: {how}".translate(dict.fromkeys(range(32), "·")))
    print(verdict(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
