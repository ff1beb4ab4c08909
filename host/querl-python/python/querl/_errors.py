"""Exceptions defined in Python."""

from ._querl import QuerlError, Rejection


class SampleRejected(QuerlError):
    """A rejected sample, for engines that need a number for every sample. A rejection has no score; it is not a score of 0."""

    def __init__(self, code: str, detail: str) -> None:
        # Pickling calls the class with `args` again, so both have to be in `args`.
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    @classmethod
    def of(cls, rejection: Rejection) -> "SampleRejected":
        return cls(rejection.code, rejection.detail)

    def __str__(self) -> str:
        return f"querl rejected the sample: {self.code}: {self.detail}"
