"""The conversion engine, which handles every corpus family by its declaration."""
