"""Penalty for terms that a rewrite copies from the query or the user's profile. README.md has the formula."""

from querl_sdk import Episode, Reward, Score, Settings, export, text

# Texts are cut to this length, which is above that of a usual rewrite, because each character costs fuel.
_MAX_CHARS = 300


class CopiedTerms(Reward):
    def __init__(self, settings: Settings) -> None:
        self.ngram = settings.integer("ngram", 2, minimum=1, maximum=8)
        self.max_query_share = settings.number("max_query_share", 0.8, minimum=0, maximum=1)
        self.max_profile_share = settings.number("max_profile_share", 0.3, minimum=0, maximum=1)

    def range(self) -> tuple[float, float]:
        return -1.0, 0.0

    def score(self, episode: Episode) -> Score:
        rewrite = self._terms(episode.policy.rewrite)
        if not rewrite:
            return Score(-1.0)
        query = rewrite & self._terms(episode.query)
        profile = (rewrite & self._terms(episode.context.user_profile)) - query
        query_share, profile_share = len(query) / len(rewrite), len(profile) / len(rewrite)
        # A term of both query and profile counts for the query only, so the sum of the two shares is at most 1.
        excess = max(0.0, query_share - self.max_query_share) + max(0.0, profile_share - self.max_profile_share)
        return Score(-min(excess, 1.0), {"query_share": query_share, "profile_share": profile_share})

    def _terms(self, of: str | None) -> set[tuple[str, ...]]:
        """The set of n-grams of a text. A text of fewer than n units is one term."""
        units = text.units((of or "")[:_MAX_CHARS])
        n_terms = max(len(units) - self.ngram + 1, min(len(units), 1))
        return {tuple(units[start : start + self.ngram]) for start in range(n_terms)}


export(reward=CopiedTerms)
