"""Scores a response by how much its dialogue is of one style."""

from querl_sdk import Dialogue, HostCallError, Rejection, Score, Settings, StyleModel, StyleScorer, export


class OneStyle(StyleScorer):
    def __init__(self, settings: Settings) -> None:
        self.label = settings.text("label", "售前")

    def score(self, dialogue: Dialogue, model: StyleModel) -> Score:
        try:
            classes = model.classify(dialogue.turns)
        except HostCallError as error:
            raise Rejection("no_style", str(error)) from error
        probability = {each.label: each.probability for each in classes}.get(self.label)
        if probability is None:
            raise Rejection("unknown_class", f"the style model has no class `{self.label}`")
        return Score(probability)


export(style_scorer=OneStyle)
