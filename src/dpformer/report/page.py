"""The page itself: one HTML file from content and template, without scripts, fonts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import dpformer
from dpformer.evaluation.metrics import LIST_METRICS, released, shown
from dpformer.files import write_text
from dpformer.format_number import one_in, percent, plain, round_up
from dpformer.kinds.popularity import BASELINE
from dpformer.noise.mechanisms import noise_of
from dpformer.options import Options
from dpformer.report.content import Content, gather, words_of
from dpformer.runs.config import SECTIONS, Config
from dpformer.runs.run import finished


def write_report(
    run_folder: str | Path,
    *,
    out: str | Path | None = None,
    histories: Sequence[Sequence[Any]] | None = None,
    public: bool = False,
    data: str | Path | None = None,
    catalog: str | Path | None = None,
) -> Path:
    """Write the report of a finished run and return its path.

    Args:
        run_folder: the run.
        out: the page; by default `report.html` in the run folder.
        histories: example histories to show, as ids of the log; by default synthetic ones made from popular items.
            Never
            give a real user's: the page shows them.
        public: omit everything that the guarantee does not cover, so that the page may be published. Otherwise the page
            shows exact statistics of the data, and is readable by its owner alone.
        data: the data of the run, if it has moved or the run is someone else's.
        catalog: catalogue with titles, if the model was trained without.
    """
    run = finished(run_folder)
    path = run.folder / "report.html" if out is None else Path(out)
    content = gather(run, histories=histories, public=public, data=data, catalog=catalog)
    write_text(path, render(content), private=not public)
    return path


def render(content: Content) -> str:
    """The page as text."""
    run, facts = content.run, content.run.statement
    return rendered(
        "page.html",
        content=content,
        facts=facts,
        title=_title(run.config),
        words=words_of(run),
        noise=noise_of(facts),
        model=run.config.kind.description(run.config),
        metrics=shown(),
        released=released(),
        of_lists=LIST_METRICS.values(),
        baseline=BASELINE.name,
        items=len(run.release.vocabulary),
        attack=facts.get("attack"),
        config=[(section.section, _choices(run.config, section)) for section in SECTIONS],
    )


def rendered(template: str, **values: Any) -> str:
    """A page made from a template, which escapes all values except our own charts and style sheet."""
    environment = Environment(
        loader=PackageLoader("dpformer", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, delta=one_in, up=round_up, plain=plain, value=_value)
    style = files("dpformer.report").joinpath("page.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(style=style, version=dpformer.__version__, **values)


def _title(config: Config) -> str:
    return "Synthetic default" if config.synthetic else config.file.name if config.file else config.table or "query"


def _choices(config: Config, section: type[Options]) -> list[tuple[str, Any]]:
    """The options of a section that are set; only the file name of a path."""
    values = [(name, getattr(config, name)) for name in section.model_fields if name not in config.kind.silent]
    return [(name, v.name if isinstance(v, Path) else v) for name, v in values if v is not None]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return plain(value, 6) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
