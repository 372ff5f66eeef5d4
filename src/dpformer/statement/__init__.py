"""The privacy statement: built, checked for its shape, signed, and turned into cards and NIST and OpenDP fields."""
