// The interfaces `rewards` and `group-rewards`, and `json-rewards`, which gives the same results.

import { Episode } from "../types.js";
import * as host from "./host.js";

export function rewardsOf(plugin) {
  return {
    range: () => range(plugin.kinds.reward),
    scoreBatch: (episodes) => scored(plugin, episodes.map(host.episode)).map(asResult),
  };
}

export function groupRewardsOf(plugin) {
  return {
    range: () => range(plugin.kinds["group-reward"]),
    scoreGroup: (episodes) => scored(plugin, episodes.map(host.episode)).map(asResult),
  };
}

export function jsonRewardsOf(plugin) {
  const written = (outcome) => ("code" in outcome ? { rejected: outcome } : { scored: outcome });
  return {
    scoreJson: (text) => JSON.stringify(scored(plugin, JSON.parse(text).map((json) => Episode.fromJson(json))).map(written)),
  };
}

function range(type) {
  const [min, max] = new type(host.settings()).range();
  return { min, max };
}

/** Scores and rejections as the contract's. */
function scored({ kinds }, episodes) {
  if (kinds.reward) {
    const scorer = new kinds.reward(host.settings());
    return episodes.map((episode) => host.attempt(() => host.score(scorer.score(episode))));
  }
  const scorer = new kinds["group-reward"](host.settings());
  const outcomes = host.attempt(() => scorer.scoreGroup(episodes));
  if (!Array.isArray(outcomes)) return episodes.map(() => outcomes);
  if (outcomes.length !== episodes.length) {
    throw new TypeError(`scoreGroup() gave ${outcomes.length} results for ${episodes.length} episodes; expected one for each`);
  }
  return outcomes.map((outcome) => (host.isRejection(outcome) ? host.rejection(outcome) : host.score(outcome)));
}

function asResult(outcome) {
  return "code" in outcome ? { tag: "err", val: outcome } : { tag: "ok", val: outcome };
}
