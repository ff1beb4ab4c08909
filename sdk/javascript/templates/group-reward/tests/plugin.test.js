import assert from "node:assert/strict";
import { test } from "node:test";
import { Settings } from "#querl-sdk";
import { checkContract, checkGolden, episode } from "#querl-sdk/testing";
import plugin, { Diversity } from "../plugin.js";

test("golden cases", () => {
  checkGolden(plugin, new URL("../golden", import.meta.url));
});

test("contract", () => checkContract(plugin));

test("equal samples score 0", () => {
  const same = [0, 1, 2].map((sampleIndex) => episode("鱼油", "深海鱼油", undefined, { sampleIndex }));
  assert.deepEqual(new Diversity(new Settings()).scoreGroup(same).map(({ total }) => total), [0, 0, 0]);
});
