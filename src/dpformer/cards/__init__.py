"""Cards about a released model, from its statement and what its owner says: for Hugging Face, for OpenDP's registry."""

from dpformer.cards.model_card import model_card, write_card
from dpformer.cards.registry import registry_entry
from dpformer.cards.source import CardSource

__all__ = ["CardSource", "model_card", "registry_entry", "write_card"]
