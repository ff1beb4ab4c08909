// Rewards the samples of one query for being different from each other.

import { plugin, Rejection, text } from "#querl-sdk";

/** @import { Episode, GroupReward, Settings } from "#querl-sdk" */

// Longer than any rewrite. Splitting a text into units takes thousands of instructions per character in a component.
const MAX_CHARS = 1000;

/** @implements {GroupReward} */
export class Diversity {
  /** @param {Settings} settings */
  constructor(settings) {
    this.ngram = settings.integer("ngram", 2, { minimum: 1, maximum: 8 });
  }

  /** @returns {[number, number]} */
  range() {
    return [0, 1];
  }

  /** @param {Episode[]} episodes */
  scoreGroup(episodes) {
    if (episodes.length < 2) {
      return episodes.map(() => new Rejection("alone", "the group has one sample; nothing to compare it with"));
    }
    const sets = episodes.map(({ policy }) => this.ngrams(policy.rewrite ?? ""));
    return sets.map((own) => ({ total: distance(own, sets.filter((other) => other !== own)) }));
  }

  /** @param {string} rewrite */
  ngrams(rewrite) {
    const units = text.units(rewrite.slice(0, MAX_CHARS));
    const starts = units.slice(0, Math.max(units.length - this.ngram + 1, 0));
    return new Set(starts.map((_, start) => units.slice(start, start + this.ngram).join(" ")));
  }
}

/**
 * The mean Jaccard distance, summed in ascending order: the order of the group must not matter.
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
