// The interfaces `rewards` and `group-rewards`, and `json-rewards`, which gives the same results.

import { rangeOf } from "../description.js";
import { Episode } from "../types.js";
import * as host from "./host.js";

export function rewardsOf(plugin) {
  return {
    range: () => range(plugin.kinds.reward),
    scoreBatch: (episodes) => scored(plugin, episodes, host.episode, asResult),
  };
}

export function groupRewardsOf(plugin) {
  return {
    range: () => range(plugin.kinds["group-reward"]),
    scoreGroup: (episodes) => scored(plugin, episodes, host.episode, asResult),
  };
}

export function jsonRewardsOf(plugin) {
  const read = (json) => Episode.fromJson(json);
  const write = (outcome) => JSON.stringify("code" in outcome ? { rejected: outcome } : { scored: outcome });
  return { scoreJson: (text) => `[${scored(plugin, JSON.parse(text), read, write).join(",")}]` };
}

function range(type) {
  const [min, max] = rangeOf(new type(host.settings()));
  return { min, max };
}

/** Scores the episodes. Returns `write(outcome)` for each, where the outcome is a score or a rejection of the contract. */
function scored({ kinds }, values, read, write) {
  const results = [];
  if (kinds.reward) {
    const scorer = new kinds.reward(host.settings());
    // Loops instead of `map` here and below: in a component a function call takes thousands of instructions, in `map` three times as many.
    for (let index = 0; index < values.length; index += 1) {
      let outcome;
      try {
        outcome = host.score(scorer.score(read(values[index])));
      } catch (error) {
        outcome = host.rejection(error);
      }
      results.push(write(outcome));
    }
    return results;
  }
  const scorer = new kinds["group-reward"](host.settings());
  const episodes = values.map(read);
  const outcomes = host.attempt(() => scorer.scoreGroup(episodes));
  if (!Array.isArray(outcomes)) return episodes.map(() => write(outcomes));
  if (outcomes.length !== episodes.length) {
    throw new TypeError(`scoreGroup() gave ${outcomes.length} results for ${episodes.length} episodes; expected one for each`);
  }
  return outcomes.map((outcome) => write(host.isRejection(outcome) ? host.rejection(outcome) : host.score(outcome)));
}

function asResult(outcome) {
  return "code" in outcome ? { tag: "err", val: outcome } : { tag: "ok", val: outcome };
}
