import assert from "node:assert/strict";
import { test } from "node:test";
import { Settings } from "#querl-sdk";
import { checkContract, checkGolden } from "#querl-sdk/testing";
import plugin, { TenantPrompt } from "../plugin.js";

const prompt = new TenantPrompt(new Settings());

test("golden cases", () => {
  checkGolden(plugin, new URL("../golden", import.meta.url));
});

test("contract", () => checkContract(plugin));

test("braces and dollar signs of a user stay as they are", () => {
  const context = { userProfile: undefined, historySummary: "问过{鱼油}" };
  const messages = prompt.messages("policy_rewrite", { query: "{domain} $& 是什么", context, rewrite: undefined });
  assert.equal(messages.at(-1).content, "历史：问过{鱼油}\n问题：{domain} $& 是什么");
});

test("an answer without a score is no guess", () => {
  assert.throws(() => prompt.parseJudgement("改写得不错"), { code: "no_score" });
});
