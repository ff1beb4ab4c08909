import assert from "node:assert/strict";
import { test } from "node:test";
import { Rejection, SettingError, Settings } from "#querl-sdk";
import { candidate, checkContract, checkGolden, episode, failed } from "#querl-sdk/testing";
import cost, { Cost } from "../plugin.js";

const score = (policy, baseline, settings) => new Cost(new Settings(settings)).score(episode("胶原咋吃", policy, baseline));
const teacher = candidate("胶原蛋白肽", [0.5]);

test("golden cases", () => {
  assert.ok(checkGolden(cost, new URL("../golden", import.meta.url)) >= 8);
});

test("contract", () => {
  checkContract(cost);
  checkContract(cost, { price: 0, n_tokens: 1 });
});

test("tokens have to be worth what they find", () => {
  const [short, long, better] = [[0.7, 8], [0.7, 24], [0.9, 24]].map(([found, nTokens]) => score(candidate("胶原蛋白肽 用法", [found], { nTokens }), teacher).total);
  assert.ok(short > long && better > short);
});

test("what is not known is a rejection", () => {
  const rejected = (policy, baseline, code) => {
    assert.throws(() => score(policy, baseline), (error) => error instanceof Rejection && error.code === code);
  };
  rejected(candidate("胶原", [0.9]), teacher, "policy_tokens_missing");
  rejected(candidate("胶原", failed(), { nTokens: 4 }), teacher, "policy_retrieval_failed");
  rejected(candidate("胶原", [0.9], { nTokens: 4 }), candidate("胶原", failed()), "baseline_retrieval_failed");
  rejected(candidate("胶原", [0.9], { nTokens: 4 }), undefined, "baseline_missing");
});

test("the end of the range is reached", () => {
  assert.equal(score(candidate(undefined, undefined, { nTokens: 64 }), candidate("胶原", [1])).total, -1.2);
});

test("unusable settings are refused", () => {
  for (const [key, value] of [["price", 2], ["n_tokens", 0]]) {
    assert.throws(() => new Cost(new Settings({ [key]: value })), (error) => error instanceof SettingError && error.key === key);
  }
});
