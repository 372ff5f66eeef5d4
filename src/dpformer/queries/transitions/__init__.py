"""Transition counts: the mechanism (`rounds`), who adds up (`backend`), the query, its noise check and its canaries."""
