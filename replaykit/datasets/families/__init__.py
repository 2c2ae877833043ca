"""The corpus families: a declaration each, with what is truly its own."""
