"""Cards about a released model, from its statement and what its owner says: for Hugging Face, for OpenDP's registry."""

from dpformer.statement.cards.model_card import model_card, write_card
from dpformer.statement.cards.opendp_registry import registry_entry
from dpformer.statement.cards.source import CardSource

__all__ = ["CardSource", "model_card", "registry_entry", "write_card"]
