// The interface `style-scores`.

import { host as functions } from "../host.js";
import * as host from "./host.js";

export function styleScoresOf(plugin) {
  return {
    scoreBatch(dialogues) {
      const scorer = new plugin.kinds["style-scorer"](host.settings());
      return dialogues.map((dialogue) => {
        const outcome = host.attempt(() => host.score(scorer.score(dialogue, functions)));
        return "code" in outcome ? { tag: "err", val: outcome } : { tag: "ok", val: outcome };
      });
    },
  };
}
