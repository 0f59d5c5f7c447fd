"""Tests mirror the rooms. A regular package, for some site-packages carry a `tests` of their own."""
