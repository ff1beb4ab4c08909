import assert from "node:assert/strict";
import { test } from "node:test";
import { SettingError, Settings } from "#querl-sdk";
import { checkContract, checkGolden, episode } from "#querl-sdk/testing";
import repetition, { Repetition } from "../plugin.js";

const score = (rewrite, settings) => new Repetition(new Settings(settings)).score(episode("胶原咋吃", rewrite)).total;

test("golden cases", () => {
  assert.ok(checkGolden(repetition, new URL("../golden", import.meta.url)) >= 8);
});

test("contract", () => {
  checkContract(repetition);
  checkContract(repetition, { ngram: 1, tolerated: 0.9, max_penalty: 10 });
});

test("more repetition costs more, up to the tolerated share nothing", () => {
  const [once, twice, often] = ["鱼油用量", "鱼油用量鱼油用量", "鱼油用量".repeat(20)].map((rewrite) => score(rewrite));
  assert.ok(once > twice && twice > often && often > -1);
  assert.equal(score("鱼油用量鱼油用量", { tolerated: 0.5 }), 0);
});

test("what costs nothing scores 0 and not -0", () => {
  assert.ok(Object.is(score("鱼油"), 0));
});

test("unusable settings are refused", () => {
  for (const [key, value] of [["ngram", 0], ["tolerated", 1], ["max_penalty", 0]]) {
    assert.throws(() => new Repetition(new Settings({ [key]: value })), (error) => error instanceof SettingError && error.key === key);
  }
});
