"""MLflow: a finished run as an MLflow run, with a pyfunc model and nothing that the guarantee does not cover.

    from dpformer.serving.mlflow import log_run

    mlflow.set_tracking_uri("http://127.0.0.1:5000")
    log_run("runs/shop", experiment="shop", registered_model="shop")

Logged are: the model with its statement (`privacy.json`) as an artifact, ε, δ, the unit of privacy and the headline as
tags, and the metrics that were released with noise. Exact metrics, losses and file names stay out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    import mlflow
    from mlflow.models import infer_signature
    from mlflow.pyfunc.model import PythonModel, PythonModelContext
except ImportError:
    from dpformer.errors import MissingExtra

    raise MissingExtra("mlflow", "mlflow") from None

from dpformer.evaluation.metrics import released
from dpformer.runs.run import Run, finished

K = 10
FILES = ("model.safetensors", "privacy.json")


class RecommenderModel(PythonModel):
    """pyfunc: a data frame with a column `history`, lists of item ids (oldest first) → one list of items for each row.

    Parameters: k (10) and filter_seen (True).
    """

    def load_context(self, context: PythonModelContext) -> None:
        from dpformer.runs.model_file import load_release
        from dpformer.serving.ranking import Ranker

        self.ranker = Ranker(load_release(context.artifacts["model.safetensors"]))

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]  # hints would be a schema
        from dpformer.serving.histories import histories_of
        from dpformer.serving.packed import Packed

        asked = {"k": K, "filter_seen": True, **(params or {})}
        packed = Packed.of(histories_of(enumerate(model_input["history"])), self.ranker.release, "report")
        top = self.ranker.top(packed.items, packed.offsets, int(asked["k"]), filter_seen=bool(asked["filter_seen"]))
        vocabulary = self.ranker.release.vocabulary
        return [[vocabulary[item] for item in row if item >= 0] for row in top.items.tolist()]


def log_run(run: str | Path | Run, *, experiment: str | None = None, registered_model: str | None = None) -> str:
    """Log a finished recommender to the tracking server of MLflow; returns the id of the MLflow run.

    Args:
        run: a run folder.
        experiment: name of the experiment; by default the active one.
        registered_model: also register the model under this name.
    """
    run = run if isinstance(run, Run) else finished(run)
    if run.config.task != "recommend":
        from dpformer.errors import DpformerError

        raise DpformerError(f"{run.folder} is a language model, but MLflow models are made of recommenders")
    if experiment is not None:
        mlflow.set_experiment(experiment)
    facts = run.statement
    with mlflow.start_run(run_name=run.folder.name) as active:
        mlflow.set_tags(tags_of(facts))
        mlflow.log_params({"model": facts["model"], "users": facts["users"]})
        for name, value in noisy_metrics(facts).items():
            mlflow.log_metric(name, value)
        mlflow.log_artifact(str(run.folder / "privacy.json"))
        mlflow.pyfunc.log_model(
            name="model",
            python_model=RecommenderModel(),
            artifacts={name: str(run.folder / name) for name in FILES},
            signature=infer_signature(params={"k": K, "filter_seen": True}),
            pip_requirements=[f"dpformer=={facts['versions']['dpformer']}"],
            registered_model_name=registered_model,
        )
        return str(active.info.run_id)


def tags_of(facts: dict[str, Any]) -> dict[str, str]:
    """The guarantee as tags."""
    named = {name: str(facts[name]) for name in ("epsilon", "delta", "unit", "private")}
    return {**{f"dp.{name}": value for name, value in named.items()}, "dp.headline": facts["headline"]}


def noisy_metrics(facts: dict[str, Any]) -> dict[str, float]:
    """The metrics that were released with noise, in names that MLflow allows: ndcg_at_10."""
    found = facts.get("metrics") if facts["private"] else None
    if found is None:
        return {}
    return {metric.label().replace("@", "_at_"): found[metric.label()] for metric in released()}
