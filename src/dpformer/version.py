"""The version in development. A build at a tag such as `v0.2.0` carries the tag's version instead (setup.py)."""

__version__ = "0.2.0.dev0"
