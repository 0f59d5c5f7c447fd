"""What steps cost, with and without drafts: measured at start by core/step_timer.py, corrected while running.

Knows no device. Read by core/speculator.py.
"""

from headrace.core.speculation.step_cost import StepCost


class StepCosts:
    """Milliseconds of plain steps, of steps that verify, and of drafting behind a step.

    Args:
        plain: by rows, of steps as they are where nothing is drafted: overlapped where the engine overlaps.
        verify: by query tokens, of steps that are waited for, without their drafting.
        draft: by rows, of drafting with the model; None = it has no drafter.
        most_tokens: query tokens of the largest step that may verify.
        most_rows: rows of it.
        whole_depth: drafting always goes as deep as it can, as recorded steps do.
    """

    def __init__(
        self,
        plain: StepCost,
        verify: StepCost,
        draft: StepCost | None,
        *,
        most_tokens: int,
        most_rows: int,
        whole_depth: bool = False,
    ) -> None:
        self.most_tokens = most_tokens
        self.most_rows = most_rows
        self.whole_depth = whole_depth
        self._plain = plain
        self._verify = verify
        self._draft = draft

    def plain_ms(self, rows: int) -> float:
        return self._plain.ms(rows)

    def verify_ms(self, tokens: int) -> float:
        return self._verify.ms(tokens)

    def draft_ms(self, rows: int) -> float:
        return 0.0 if self._draft is None else self._draft.ms(rows)

    def observe(self, rows: int, tokens: int, ms: float, *, drafting: bool, waited: bool) -> None:
        """A step of decodes took `ms`.

        Args:
            rows: of the step.
            tokens: its query tokens.
            ms: its part of the wall clock.
            drafting: the model drafted behind it.
            waited: it was committed before the next one was made.
        """
        if drafting or tokens > rows or waited:
            self._verify.observe(tokens, ms - (self.draft_ms(rows) if drafting else 0.0))
        if tokens == rows and not drafting:
            self._plain.observe(rows, ms)
