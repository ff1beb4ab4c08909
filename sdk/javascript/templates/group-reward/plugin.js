// Reward for diversity within a group, which is all samples of one query: the mean Jaccard distance of n-grams to the other samples.

import { plugin, Rejection, text } from "#querl-sdk";

/** @import { Episode, GroupReward, Settings } from "#querl-sdk" */

// Texts are cut to this length, which is above that of any useful rewrite: splitting a text into units takes thousands of instructions per
// character in a component, and instructions per item are limited.
const MAX_CHARS = 1000;

/**
 * The reward with its settings. querl constructs an object for each call: store no state between groups.
 * @implements {GroupReward}
 */
export class Diversity {
  /**
   * Reads all settings, each with its default and bounds. querl refuses a key that is not read here.
   * @param {Settings} settings
   */
  constructor(settings) {
    this.ngram = settings.integer("ngram", 2, { minimum: 1, maximum: 8 });
  }

  /**
   * Lowest and highest total with these settings. A total outside this range stops the run.
   * @returns {[number, number]}
   */
  range() {
    return [0, 1];
  }

  /**
   * One result per episode, in the same order. Results must not depend on the order of the episodes. A returned rejection drops one
   * episode, a thrown one the group.
   * @param {Episode[]} episodes
   */
  scoreGroup(episodes) {
    if (episodes.length < 2) {
      return episodes.map(() => new Rejection("alone", "the group has one sample; nothing to compare it with"));
    }
    const sets = episodes.map(({ policy }) => this.ngrams(policy.rewrite ?? ""));
    return sets.map((own) => ({ total: distance(own, sets.filter((other) => other !== own)) }));
  }

  /**
   * The set of n-grams, joined by spaces. A unit is a character, or a word of ASCII letters and digits.
   * @param {string} rewrite
   */
  ngrams(rewrite) {
    const units = text.units(rewrite.slice(0, MAX_CHARS));
    const starts = units.slice(0, Math.max(units.length - this.ngram + 1, 0));
    return new Set(starts.map((_, start) => units.slice(start, start + this.ngram).join(" ")));
  }
}

/**
 * The mean Jaccard distance. Sorted before the sum, because rounding depends on the order of a sum.
 * @param {Set<string>} own
 * @param {Set<string>[]} others
 */
function distance(own, others) {
  const distances = others.map((other) => {
    const nUnion = new Set([...own, ...other]).size;
    const nShared = own.size + other.size - nUnion;
    return nUnion === 0 ? 0 : (nUnion - nShared) / nUnion;
  });
  return distances.sort((a, b) => a - b).reduce((sum, each) => sum + each, 0) / others.length;
}

export default plugin({ groupReward: Diversity });
