"""Schemas of the JSON files that others may have written. A file is checked before its values are used."""
