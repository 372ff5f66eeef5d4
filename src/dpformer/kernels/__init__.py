"""Compiled code for the CPU. `native` is the interface; the C sources are in this folder."""
