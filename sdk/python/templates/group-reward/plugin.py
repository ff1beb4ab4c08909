"""Rewards the samples of one query for being different from each other."""

from querl_sdk import Episode, GroupReward, Rejection, Score, Settings, export, text


class Diversity(GroupReward):
    def __init__(self, settings: Settings) -> None:
        self.ngram = settings.integer("ngram", 2, minimum=1, maximum=8)

    def range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score_group(self, episodes: list[Episode]) -> list[Score | Rejection]:
        if len(episodes) < 2:
            return [Rejection("alone", "the group has one sample; nothing to compare it with") for _ in episodes]
        sets = [self._ngrams(each.policy.rewrite or "") for each in episodes]
        return [Score(self._distance(index, sets)) for index in range(len(sets))]

    def _ngrams(self, rewrite: str) -> set[tuple[str, ...]]:
        units = text.units(rewrite)
        return set(zip(*(units[start:] for start in range(self.ngram))))

    def _distance(self, index: int, sets: list[set[tuple[str, ...]]]) -> float:
        """The mean Jaccard distance to the other samples, summed in ascending order: the order of the group must not matter."""
        own, others = sets[index], sets[:index] + sets[index + 1 :]
        return sum(sorted(len(own ^ other) / max(len(own | other), 1) for other in others)) / len(others)


export(group_reward=Diversity)
