"""Documents about a released model, from its statement and its owner's words: Hugging Face, OpenDP, DPIA."""

from dpformer.statement.cards.dpia import assessment
from dpformer.statement.cards.model_card import model_card, write_card
from dpformer.statement.cards.opendp_registry import registry_entry
from dpformer.statement.cards.source import CardSource

__all__ = ["CardSource", "assessment", "model_card", "registry_entry", "write_card"]
