"""Filter: drops samples whose rewrite makes a claim that is banned in advertising for health food. README.md has the list."""

from claims import Claims, normalised
from querl_sdk import Filter, Rejection, Sample, SettingError, Settings, export


class BannedClaims(Filter):
    def __init__(self, settings: Settings) -> None:
        extra_words = _phrases(settings, "extra_words")
        allowed = _phrases(settings, "allowed")
        questions = settings.choice("questions", "keep", ["keep", "drop"])
        self._claims = Claims(extra_words, allowed, questions_count=questions == "drop")

    def check(self, sample: Sample) -> None:
        claim = self._claims.first(sample.rewritten_query)
        if claim is not None:
            raise Rejection(claim.code, f"the rewrite claims `{claim.word}`")


def _phrases(settings: Settings, key: str) -> list[str]:
    phrases = settings.texts(key)
    if not all(normalised(phrase) for phrase in phrases):
        raise SettingError(key, "expected words, got a blank one")
    return phrases


export(filter=BannedClaims)
