// The interface `prompts`.

import * as host from "./host.js";

export function promptsOf(plugin) {
  const prompt = () => new plugin.kinds.prompt(host.settings());
  const parsed = (parse) => {
    try {
      return parse(prompt());
    } catch (error) {
      // The bindings turn what is thrown into the contract's error.
      throw host.rejection(error);
    }
  };
  return {
    messages: (task, input) => prompt().messages(task.replaceAll("-", "_"), input),
    parseRewrite: (text) => parsed((prompt) => prompt.parseRewrite(text)),
    parseJudgement: (text) => parsed((prompt) => ({ reason: "", ...prompt.parseJudgement(text) })),
  };
}
