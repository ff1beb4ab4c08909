// Prompts for the knowledge base of one tenant, and the parsers of the models' responses.

import { Message, plugin, Rejection, stripped } from "#querl-sdk";

// System prompts by task. `{domain}` is replaced by the setting `domain`.
const SYSTEMS = {
  teacher_rewrite: "你为{domain}知识库改写用户的问题：补全指代，去掉口语，不添加用户没有问的内容。只输出改写后的查询。",
  policy_rewrite: "把用户的问题改写成{domain}知识库的检索查询，只输出查询。",
  judge: "你评审{domain}知识库的查询改写，按意图是否保留、是否便于检索打 0 到 5 分。输出一行：得分：分数。理由",
};

/** @import { Prompt, PromptInput, PromptTask, Settings } from "#querl-sdk" */

// Longer responses are rejected. No query is as long, and returning a text takes thousands of instructions per character in a component.
const MAX_CHARS = 1000;

/**
 * The prompts with their settings. querl constructs an object for each call.
 * @implements {Prompt}
 */
export class TenantPrompt {
  /**
   * Reads all settings, each with its default. querl refuses a key that is not read here.
   * @param {Settings} settings
   */
  constructor(settings) {
    this.domain = settings.text("domain", "营养保健品");
  }

  /**
   * The messages of the prompt for one task: at least one, the last from the user, a system message only at the start.
   * @param {PromptTask} task
   * @param {PromptInput} input
   */
  messages(task, { query, context, rewrite }) {
    const lines = [
      context.userProfile && `用户画像：${context.userProfile}`,
      context.historySummary && `历史：${context.historySummary}`,
      `问题：${query}`,
      rewrite !== undefined && `改写：${rewrite}`,
    ];
    const system = SYSTEMS[task].replaceAll("{domain}", () => this.domain);
    return [Message.system(system), Message.user(lines.filter((line) => line).join("\n"))];
  }

  /**
   * The rewrite in the response of the teacher or the policy, without the label and quotes around it; not empty.
   * @param {string} text
   */
  parseRewrite(text) {
    if (text.length > MAX_CHARS) throw new Rejection("too_long", `${text.length} characters; at most ${MAX_CHARS} expected`);
    const rewrite = stripped(text.trim().replace(/^改写后的查询[:：]/, ""), " \t\n\"“”「」");
    if (!rewrite) throw new Rejection("no_rewrite", "the response holds no rewrite");
    return rewrite;
  }

  /**
   * The score (0 to 5) and reason in a judge's response. Throw a `Rejection` if there is no such score; do not guess one.
   * @param {string} text
   */
  parseJudgement(text) {
    // Two forms: `得分：4.5。理由`, which SYSTEMS.judge requests, and the JSON object of querl's rubric judge, {"综合得分": 4.5, "评分理由": "..."}
    const found = /得分"?\s*[:：]\s*"?(\d+(?:\.\d+)?)"?[。.，,\s]*(?:"评分理由"\s*:\s*)?([^]*)/.exec(text);
    if (!found || Number(found[1]) > 5) throw new Rejection("no_score", "the response holds no score from 0 to 5");
    return { score: Number(found[1]), reason: stripped(found[2], ' \t\n"}`') };
  }
}

export default plugin({ prompt: TenantPrompt });
