"""Ranking metrics, one definition each, and the evaluation of a recommender on held-out items."""

from dpformer.evaluation.evaluate import Evaluation, ServedRanks, evaluate, popularity
from dpformer.evaluation.metrics import bootstrap, hit, mrr, ndcg
from dpformer.evaluation.ranking import NonFiniteScores, ranks

__all__ = [
    "Evaluation",
    "NonFiniteScores",
    "ServedRanks",
    "bootstrap",
    "evaluate",
    "hit",
    "mrr",
    "ndcg",
    "popularity",
    "ranks",
]
