"""How the embedded model was made: its text, its training, its export and how it was judged.

Not part of the wheel. Run from the repository's root as `PYTHONPATH=. python -P -m training.prepare` and so on;
docs/training.md says how.
"""
