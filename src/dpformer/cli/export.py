"""`dpformer export RUN model.onnx`: one file for serving, checked before it is written; checkpoints as a folder."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.errors import DpformerError


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or a model.safetensors file.")],
    out: Annotated[
        Path | None, typer.Argument(help="Output ONNX file; for a fine-tuned checkpoint, a folder.", show_default=False)
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Number of items to recommend, fixed in the file.")] = 10,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantize weights to 8 bits and report the loss of NDCG.")
    ] = False,
    allow_seen: Annotated[
        bool, typer.Option("--allow-seen", help="Also recommend items of the history, fixed in the file.")
    ] = False,
    vectors: Annotated[
        Path | None, typer.Option(help="Write item vectors to this Parquet file, for vector search.")
    ] = None,
    index: Annotated[Path | None, typer.Option(help="Write an index of usearch over the item vectors.")] = None,
    queries: Annotated[
        Path | None, typer.Option(help="Write the query vectors of --histories to this Parquet file.")
    ] = None,
    histories: Annotated[
        Path | None, typer.Option(help="Histories for --queries: a log, read as training did, or JSON lines.")
    ] = None,
    dim: Annotated[
        int | None, typer.Option(help="Coordinates of the vectors of counts.  [default: 64]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Export a model as ONNX: histories in, the best (unseen) items out, for any batch size and length.

    A fine-tuned Hugging Face checkpoint is written in its own format, into a folder, with its privacy statement.
    """
    asked = [path for path in (vectors, index, queries) if path is not None]
    if (out is None) == (not asked):
        raise DpformerError("give either an output file (model.onnx), or --vectors, --index or --queries")
    if (queries is None) != (histories is None):
        raise DpformerError("--queries and --histories need each other")
    if dim is not None and not asked:
        raise DpformerError("--dim needs --vectors, --index or --queries")
    from dpformer.export import export_onnx
    from dpformer.kinds.registry import kind_of
    from dpformer.runs.model_file import load_release, model_file

    release = load_release(model_file(run))
    if out is None:
        _vectors(run, release, vectors, index, queries, histories, dim, as_json)
        return
    if out.suffix != ".onnx" and kind_of(release.model).exports_folder:
        _folder(run, release, out, as_json)
        return
    exported = export_onnx(release, out, k=k, int8=int8, filter_seen=not allow_seen)
    facts: dict[str, Any] = {**asdict(exported), "path": str(exported.path)}
    if int8:
        facts["int8_loss"] = _loss(run, release, exported)
    typer.echo(json.dumps(facts, indent=2) if as_json else _words(facts))


def _folder(run: Path, release: Any, out: Path, as_json: bool) -> None:
    from dpformer.kinds.registry import kind_of
    from dpformer.runs import finished

    if not run.is_dir():
        raise DpformerError(f"{run} has no privacy statement beside it: give the run folder")
    statement = finished(run).statement
    names = [path.name for path in kind_of(release.model).export_folder(release, out, statement)]
    typer.echo(json.dumps({"path": str(out), "files": names}) if as_json else f"{out}: {', '.join(names)}")


def _vectors(
    run: Path,
    release: Any,
    vectors: Path | None,
    index: Path | None,
    queries: Path | None,
    histories: Path | None,
    dim: int | None,
    as_json: bool,
) -> None:
    import numpy as np

    from dpformer.export.vectors import vectors_of, write_index, write_items, write_queries

    found = vectors_of(release, dim)
    facts: dict[str, Any] = {"items": len(found.items), "dim": found.items.shape[1], "lost": found.lost}
    if found.lost is not None:
        facts["loss"] = _measured(run, lambda data: _loss_of_vectors(found, release, data))
    if vectors is not None:
        write_items(found, release, vectors)
    if index is not None:
        facts["recall"] = write_index(found, index)
    if queries is not None and histories is not None:
        from dpformer.serving.histories import read_histories
        from dpformer.serving.packed import Packed

        packed = Packed.of(read_histories(histories, run if run.is_dir() else None), release)
        if packed.note:
            typer.echo(packed.note, err=True)
        write_queries(found, packed.user_ids, np.split(packed.items, packed.offsets[1:-1]), queries)
        facts["users"] = len(packed.user_ids)
    typer.echo(json.dumps(facts, indent=2) if as_json else _words_of_vectors(facts, vectors, index, queries))


def _loss_of_vectors(found: Any, release: Any, dataset: Any) -> dict[str, Any]:
    from dpformer.export.vectors import measure_loss

    return measure_loss(found, release, dataset)


def _words_of_vectors(facts: dict[str, Any], vectors: Path | None, index: Path | None, queries: Path | None) -> str:
    size = f"{facts['items']:,} item vectors with {facts['dim']} coordinates"
    lines = [f"{vectors}: {size}"] if vectors is not None else []
    if index is not None:
        lines.append(
            f"{index}: an index of {size}; it finds {facts['recall']:.1%} of the ten best items of random queries"
        )
    if queries is not None:
        lines.append(f"{queries}: query vectors of {facts['users']:,} users, as private as their histories")
    loss = facts.get("loss")
    if loss is None:
        lines.append("inner products are the model's scores")
        return "\n".join(lines)
    lines.append(f"a low rank loses {facts['lost']:.1%} of the squares of the counts (more coordinates: --dim)")
    if "unknown" in loss:
        lines.append(f"the loss of NDCG could not be measured: {loss['unknown']}")
    else:
        lines.append(
            f"NDCG is {loss['ndcg_vectors']:.4f} instead of {loss['ndcg']:.4f} over the held-out items of "
            f"{loss['users']:,} users (not covered by the guarantee)"
        )
    return "\n".join(lines)


def _loss(run: Path, release: Any, exported: Any) -> dict[str, Any]:
    """NDCG on the run's held-out items before and after quantization, or why it could not be measured."""
    from dpformer.export.loss import measure_loss

    return _measured(run, lambda data: measure_loss(exported.path, release, data, exported.k, exported.filter_seen))


def _measured(run: Path, measure: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Something measured on the run's held-out data, or why it could not be."""
    from dpformer.report.accuracy import held_out_data
    from dpformer.runs import finished

    if not run.is_dir():
        return {"unknown": f"{run} is a model file only; give the run folder"}
    try:
        return measure(held_out_data(finished(run)))
    except DpformerError as error:
        return {"unknown": str(error)}


def _words(facts: dict[str, Any]) -> str:
    seen = "unseen" if facts["filter_seen"] else "seen or unseen"
    lines = [
        f"{facts['path']}: {facts['bytes'] / 1e6:,.2f} MB, returns the top {facts['k']} {seen} items"
        + (", int8 weights" if facts["int8"] else ""),
        f"ONNX Runtime agrees with PyTorch on {facts['checked']} random histories; scores differ by at most "
        f"{facts['largest_difference']:.1g}",
    ]
    loss = facts.get("int8_loss")
    if loss and "unknown" in loss:
        lines.append(f"the loss of NDCG from int8 could not be measured: {loss['unknown']}")
    elif loss:
        lines.append(
            f"int8 changes NDCG@{loss['k']} from {loss['ndcg']:.4f} to {loss['ndcg_int8']:.4f}, a loss of "
            f"{round(loss['loss'], 4) + 0:.4f}, over the held-out items of {loss['users']:,} users (not covered by the "
            "guarantee)"
        )
    return "\n".join(lines)
