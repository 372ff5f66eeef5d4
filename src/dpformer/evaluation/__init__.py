"""Ranking metrics, one definition each, and the evaluation of a recommender on held-out items."""

from dpformer.evaluation.evaluate import Evaluation, evaluate, popularity
from dpformer.evaluation.ranking import NonFiniteScores, bootstrap, hit, mrr, ndcg, ranks

__all__ = [
    "Evaluation",
    "NonFiniteScores",
    "bootstrap",
    "evaluate",
    "hit",
    "mrr",
    "ndcg",
    "popularity",
    "ranks",
]
