"""The conversion engine: it knows no corpus family, only declarations of them."""
