"""Helper programs that `dev.py` and the end-to-end tests run; no part of the installed package."""
