import assert from "node:assert/strict";
import { test } from "node:test";
import { SettingError, Settings } from "#querl-sdk";
import { candidate, checkContract, checkGolden, episode } from "#querl-sdk/testing";
import brevity, { Brevity } from "../plugin.js";
import { nChars } from "../text.js";

const score = (policy, baseline) => new Brevity(new Settings()).score(episode("胶原咋吃", policy, baseline));

test("golden cases", () => {
  assert.ok(checkGolden(brevity, new URL("../golden", import.meta.url)) >= 8);
});

test("contract", () => {
  checkContract(brevity);
  checkContract(brevity, { enough_chars: 1, quality_tolerance: 0 });
});

test("a character counts once, whatever its plane, and punctuation not at all", () => {
  assert.equal(nChars("鱼油 DHA，𠮷！？（100%）"), 9);
  assert.equal(nChars("　，。 \n"), 0);
});

test("finding nothing is an answer: the policy keeps the quality of a teacher that found nothing", () => {
  const { components } = score(candidate("胶原蛋白肽", []), candidate("胶原蛋白肽的服用方法", []));
  assert.equal(components.kept_quality, 1);
});

test("unusable settings are refused", () => {
  for (const [key, value] of [["enough_chars", 0], ["enough_chars", 1.5], ["quality_tolerance", "high"]]) {
    assert.throws(() => new Brevity(new Settings({ [key]: value })), (error) => error instanceof SettingError && error.key === key);
  }
});
