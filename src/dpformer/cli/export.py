"""`dpformer export RUN model.onnx`: one file for serving, checked before it is written; checkpoints as a folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.errors import DpformerError


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or a model.safetensors file.")],
    out: Annotated[Path, typer.Argument(help="Output ONNX file; for a fine-tuned checkpoint, a folder.")],
    k: Annotated[int, typer.Option("-k", help="Number of items to recommend, fixed in the file.")] = 10,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantize weights to 8 bits and report the loss of NDCG.")
    ] = False,
    allow_seen: Annotated[
        bool, typer.Option("--allow-seen", help="Also recommend items of the history, fixed in the file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Export a model as ONNX: histories in, the best (unseen) items out, for any batch size and length.

    A fine-tuned Hugging Face checkpoint is written in its own format, into a folder, with its privacy statement.
    """
    from dpformer.export import export_onnx
    from dpformer.kinds.registry import kind_of
    from dpformer.runs.model_file import load_release, model_file

    release = load_release(model_file(run))
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


def _loss(run: Path, release: Any, exported: Any) -> dict[str, Any]:
    """NDCG on the run's held-out items before and after quantization, or why it could not be measured."""
    from dpformer.export.loss import measure_loss
    from dpformer.report.accuracy import held_out_data
    from dpformer.runs import finished

    if not run.is_dir():
        return {"unknown": f"{run} is a model file only; give the run folder"}
    try:
        return measure_loss(exported.path, release, held_out_data(finished(run)), exported.k, exported.filter_seen)
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
