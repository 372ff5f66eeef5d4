"""Kinds of models: what `--model` names, one file each."""
