import assert from "node:assert/strict";
import { test } from "node:test";
import { Settings } from "#querl-sdk";
import { checkContract, checkGolden, episode } from "#querl-sdk/testing";
import plugin, { Brevity } from "../plugin.js";

test("golden cases", () => {
  checkGolden(plugin, new URL("../golden", import.meta.url));
});

test("contract", () => checkContract(plugin));

test("the shorter rewrite scores higher", () => {
  const brevity = new Brevity(new Settings());
  const [short, long] = [episode("胶原咋吃", "胶原蛋白肽"), episode("胶原咋吃", "胶原蛋白肽的正确服用方法")];
  assert.ok(brevity.score(short).total > brevity.score(long).total);
});
