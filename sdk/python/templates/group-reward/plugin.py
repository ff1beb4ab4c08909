"""Reward for diversity within a group, which is all samples of one query: the mean Jaccard distance of n-grams to the other samples."""

from querl_sdk import Episode, GroupReward, Rejection, Score, Settings, export, text


class Diversity(GroupReward):
    """The reward with its settings. querl constructs an object for each call: store no state between groups."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings, each with its default and bounds. querl refuses a key that is not read here."""
        self.ngram = settings.integer("ngram", 2, minimum=1, maximum=8)

    def range(self) -> tuple[float, float]:
        """Lowest and highest total with these settings. A total outside this range stops the run."""
        return 0.0, 1.0

    def score_group(self, episodes: list[Episode]) -> list[Score | Rejection]:
        """One result per episode, in the same order. Results must not depend on the order of the episodes.

        A returned rejection drops one episode, a raised one the group.
        """
        if len(episodes) < 2:
            return [Rejection("alone", "the group has one sample; nothing to compare it with") for _ in episodes]
        sets = [self._ngrams(each.policy.rewrite or "") for each in episodes]
        return [Score(self._distance(index, sets)) for index in range(len(sets))]

    def _ngrams(self, rewrite: str) -> set[tuple[str, ...]]:
        """The set of n-grams. A unit is a character, or a word of ASCII letters and digits."""
        units = text.units(rewrite)
        return set(zip(*(units[start:] for start in range(self.ngram))))

    def _distance(self, index: int, sets: list[set[tuple[str, ...]]]) -> float:
        """The mean Jaccard distance to the other samples. Sorted before the sum, because rounding depends on the order of a sum."""
        own, others = sets[index], sets[:index] + sets[index + 1 :]
        return sum(sorted(len(own ^ other) / max(len(own | other), 1) for other in others)) / len(others)


export(group_reward=Diversity)
