// Style scorer: the score of a response is the probability of one class of the run's style model.

import { HostCallError, plugin, Rejection } from "#querl-sdk";

/** @import { Dialogue, Settings, StyleModel, StyleScorer } from "#querl-sdk" */

/**
 * The scorer with its settings. querl constructs an object for each call: store no state between dialogues.
 * @implements {StyleScorer}
 */
export class OneStyle {
  /**
   * Reads all settings, each with its default. querl refuses a key that is not read here.
   * @param {Settings} settings
   */
  constructor(settings) {
    this.label = settings.text("label", "售前");
  }

  /**
   * Scores the last turn of a dialogue, which is the assistant's: 0 (worst) to 1 (best). Throw a `Rejection` if that is not possible: the
   * dialogue is dropped. It does not get a score of 0.
   * @param {Dialogue} dialogue
   * @param {StyleModel} model
   */
  score(dialogue, model) {
    const found = this.classes(dialogue, model).find(({ label }) => label === this.label);
    if (!found) throw new Rejection("unknown_class", `the style model has no class \`${this.label}\``);
    return { total: found.probability };
  }

  /**
   * The probability of each class. The call fails if the run has no style model.
   * @param {Dialogue} dialogue
   * @param {StyleModel} model
   */
  classes(dialogue, model) {
    try {
      return model.classify(dialogue.turns);
    } catch (error) {
      if (error instanceof HostCallError) throw new Rejection("no_style", error.message);
      throw error;
    }
  }
}

export default plugin({ styleScorer: OneStyle });
