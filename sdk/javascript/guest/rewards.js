// The interface `rewards`.

import { Episode } from "../types.js";
import * as host from "./host.js";

export function rewardsOf(plugin) {
  const reward = () => new plugin.kinds.reward(host.settings());
  return {
    range() {
      const [min, max] = reward().range();
      return { min, max };
    },
    scoreBatch(episodes) {
      const scorer = reward();
      return episodes.map((value) => {
        value.policy = host.candidate(value.policy);
        value.baseline = host.candidate(value.baseline);
        return host.resultOf(() => host.score(scorer.score(new Episode(value))));
      });
    },
  };
}
