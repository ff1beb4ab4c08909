"""Reward for short rewrites: total = max(0, 1 - n_chars / max_chars). Replace `Brevity.score` by your own formula."""

from querl_sdk import Episode, Reward, Score, Settings, export


class Brevity(Reward):
    """The reward with its settings. querl constructs an object for each call: store no state between episodes."""

    # An episode has the query, its context and the policy's rewrite. Further inputs must be declared here: "response", "prompt", "columns",
    # "baseline" (the teacher's rewrite), "retrieval", "judgement" or "style".
    requires = ()

    def __init__(self, settings: Settings) -> None:
        """Reads all settings, each with its default and bounds. querl refuses a key that is not read here."""
        self.max_chars = settings.number("max_chars", 40, minimum=1, maximum=1000)

    def range(self) -> tuple[float, float]:
        """Lowest and highest total with these settings. A total outside this range stops the run."""
        return 0.0, 1.0

    def score(self, episode: Episode) -> Score:
        """The score of one episode. Raise `Rejection` if it cannot be computed: that drops the episode, a score of 0 trains on it."""
        # A response without a rewrite gets the lowest score, so that the policy learns to write one.
        if episode.policy.rewrite is None:
            return Score(0.0)
        brevity = max(0.0, 1 - len(episode.policy.rewrite) / self.max_chars)
        # Components are named parts of the score for metrics and reports.
        return Score(brevity, {"brevity": brevity})


export(reward=Brevity)
