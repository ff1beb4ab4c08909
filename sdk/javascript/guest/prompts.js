// The interface `prompts`.

import { Rejection } from "../types.js";
import * as host from "./host.js";

const TASKS = ["teacher_rewrite", "policy_rewrite", "judge"];

export function promptsOf(plugin) {
  const orRejection = (call) => {
    try {
      return call(new plugin.kinds.prompt(host.settings()));
    } catch (error) {
      // The bindings convert the thrown object to the contract's error.
      throw host.rejection(error);
    }
  };
  return {
    messages: (task, input) =>
      orRejection((prompt) => {
        const name = host.caseName(task);
        if (!TASKS.includes(name)) throw new Rejection("unknown_task", `the plugin has no prompt for the task \`${name}\``);
        return prompt.messages(name, input);
      }),
    parseRewrite: (text) => orRejection((prompt) => prompt.parseRewrite(text)),
    parseJudgement: (text) => orRejection((prompt) => ({ reason: "", ...prompt.parseJudgement(text) })),
  };
}
