"""Adapters of other frameworks; each is imported by its module, and needs the extra of the same name."""
