"""Drops samples whose rewrite is too long."""

from querl_sdk import Filter, Rejection, Sample, Settings, export


class Length(Filter):
    def __init__(self, settings: Settings) -> None:
        self.max_chars = settings.integer("max_chars", 40, minimum=1, maximum=1000)

    def check(self, sample: Sample) -> None:
        n_chars = len(sample.rewritten_query)
        if n_chars > self.max_chars:
            raise Rejection("too_long", f"{n_chars} characters; at most {self.max_chars} allowed")


export(filter=Length)
