"""`/v1/models`: the one model served. Knows no socket; routes.py calls."""

import time
from typing import Any

from headrace.gateway.errors import ApiError
from headrace.gateway.jobs import Jobs


class Models:
    """The answers, made on demand since the engines say the context's length."""

    def __init__(self, name: str, jobs: Jobs) -> None:
        self._name = name
        self._jobs = jobs
        self._created = int(time.time())

    def all(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.one(self._name)]}

    def one(self, name: str) -> dict[str, Any]:
        """One model.

        Raises:
            ApiError: 404, another is served.
        """
        self._jobs.check_model(name)
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "root": self._name,
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        """None until an engine has said it: a list of models must not fail for that."""
        try:
            return self._jobs.max_model_len
        except ApiError:
            return None
