"""The pack's version, equal to pyproject.toml's (a test compares them). Part of every engine's key."""

VERSION = "0.1.0"
