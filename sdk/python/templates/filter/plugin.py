"""Filter of the training data: drops samples whose rewrite has more than `max_chars` characters."""

from querl_sdk import Filter, Rejection, Sample, Settings, export


class Length(Filter):
    """The filter with its settings. querl constructs one object per batch of samples."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings, each with its default and bounds. querl refuses a key that is not read here."""
        self.max_chars = settings.integer("max_chars", 40, minimum=1, maximum=1000)

    def check(self, sample: Sample) -> None:
        """Returns to keep the sample, raises `Rejection` to drop it.

        The result may depend on earlier samples of the batch, for example to find duplicates.
        """
        n_chars = len(sample.rewritten_query)
        if n_chars > self.max_chars:
            # The code is counted in the report of the run; the sentence is for people.
            raise Rejection("too_long", f"{n_chars} characters; at most {self.max_chars} allowed")


export(filter=Length)
