"""Style scorer: the score of a response is the probability of one class of the run's style model."""

from querl_sdk import Dialogue, HostCallError, Rejection, Score, Settings, StyleModel, StyleScorer, export


class OneStyle(StyleScorer):
    """The scorer with its settings. querl constructs an object for each call: store no state between dialogues."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings, each with its default. querl refuses a key that is not read here."""
        self.label = settings.text("label", "售前")

    def score(self, dialogue: Dialogue, model: StyleModel) -> Score:
        """Scores the last turn of a dialogue, which is the assistant's: 0 (worst) to 1 (best).

        Raise `Rejection` if that is not possible: the dialogue is dropped. It does not get a score of 0.
        """
        try:
            classes = model.classify(dialogue.turns)
        except HostCallError as error:  # no style model, or the call failed
            raise Rejection("no_style", str(error)) from error
        probability = {each.label: each.probability for each in classes}.get(self.label)
        if probability is None:
            raise Rejection("unknown_class", f"the style model has no class `{self.label}`")
        return Score(probability)


export(style_scorer=OneStyle)
