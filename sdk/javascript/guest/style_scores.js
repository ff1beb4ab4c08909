// The interface `style-scores`.

import { classify } from "querl:plugin/style-model@0.1.0";
import { ClassifyError } from "../style.js";
import * as host from "./host.js";

export function styleScoresOf(plugin) {
  return {
    scoreBatch(dialogues) {
      const scorer = new plugin.kinds["style-scorer"](host.settings());
      return dialogues.map((dialogue) => host.resultOf(() => host.score(scorer.score(dialogue, model))));
    },
  };
}

/** The style model that the host holds. */
const model = {
  classify(turns) {
    try {
      return classify(turns);
    } catch (error) {
      const reason = error?.payload ?? error;
      if (reason?.tag === "failed") throw new ClassifyError(host.callFailure(reason.val));
      if (reason?.tag === "not-configured") throw new ClassifyError();
      throw error;
    }
  },
};
