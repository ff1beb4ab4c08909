// Scores a response by how much its dialogue is of one style.

import { HostCallError, plugin, Rejection } from "#querl-sdk";

/** @import { Dialogue, Settings, StyleModel, StyleScorer } from "#querl-sdk" */

/** @implements {StyleScorer} */
export class OneStyle {
  /** @param {Settings} settings */
  constructor(settings) {
    this.label = settings.text("label", "售前");
  }

  /**
   * @param {Dialogue} dialogue
   * @param {StyleModel} model
   */
  score(dialogue, model) {
    const found = this.classes(dialogue, model).find(({ label }) => label === this.label);
    if (!found) throw new Rejection("unknown_class", `the style model has no class \`${this.label}\``);
    return { total: found.probability };
  }

  /**
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
