"""Transition counts: the mechanism (`rounds`), summation (`backend`), the query, its noise check and its canaries."""
