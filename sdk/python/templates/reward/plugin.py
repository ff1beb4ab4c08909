"""Rewards a rewrite for being short."""

from querl_sdk import Episode, Reward, Score, Settings, export


class Brevity(Reward):
    # Add "retrieval", "judgement", "baseline", "columns", "response", "prompt" or "style" to read them.
    requires = ()

    def __init__(self, settings: Settings) -> None:
        self.max_chars = settings.number("max_chars", 40, minimum=1, maximum=1000)

    def range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, episode: Episode) -> Score:
        if episode.policy.rewrite is None:
            return Score(0.0)
        brevity = max(0.0, 1 - len(episode.policy.rewrite) / self.max_chars)
        return Score(brevity, {"brevity": brevity})


export(reward=Brevity)
