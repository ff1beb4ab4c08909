"""Exceptions that the extension module does not have."""

from ._querl import QuerlError, Rejection


class SampleRejected(QuerlError):
    """Raised where an engine takes a number for every sample: a rejection has none, and is not a score of 0."""

    def __init__(self, code: str, detail: str) -> None:
        # Both are arguments of the exception, so that it can be pickled by a worker.
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    @classmethod
    def of(cls, rejection: Rejection) -> "SampleRejected":
        return cls(rejection.code, rejection.detail)

    def __str__(self) -> str:
        return f"querl rejected the sample: {self.code}: {self.detail}"
