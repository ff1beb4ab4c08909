// What the host offers, and the word on what went wrong. Runs in components only; `querl plugin build` makes the module that
// uses it: the bindings `querl:plugin/...` exist in a component alone.

import { log as logOfHost } from "querl:plugin/log@0.1.0";
import { get } from "querl:plugin/settings@0.1.0";
import { sendLogTo } from "../log.js";
import { Settings } from "../settings.js";
import { CallFailure, Candidate } from "../types.js";

sendLogTo((level, message) => logOfHost(level, message));

/** The settings that the host holds. */
export function settings() {
  return Settings.fromSource(get);
}

/** A result of the contract: what `call` returns, or the rejection that it throws. */
export function resultOf(call) {
  try {
    return { tag: "ok", val: call() };
  } catch (error) {
    return { tag: "err", val: rejection(error) };
  }
}

/** A rejection as the contract's; any other exception is rethrown, and ends the instance with its text as the fault's. */
export function rejection(error) {
  if (error?.name !== "Rejection") throw error;
  return { code: error.code, detail: error.detail };
}

export function callFailure({ kind, message }) {
  return new CallFailure(kind.replaceAll("-", "_"), message);
}

export function candidate(value) {
  const { retrieval, judgement } = value;
  value.retrieval = retrieval.tag === "hits" ? retrieval.val : callFailure(retrieval.val);
  value.judgement = judgement.tag === "failed" ? callFailure(judgement.val) : judgement.val;
  return new Candidate(value);
}

/** A score as the contract's, checked here: the bindings would turn what is no number into NaN. */
export function score(value) {
  if (typeof value?.total !== "number") {
    throw new TypeError(`score() returned ${JSON.stringify(value)}; expected { total: NUMBER, components: { NAME: NUMBER } }`);
  }
  const components = Object.entries(value.components ?? {}).map(([name, part]) => ({ name, value: number(name, part) }));
  return { total: value.total, components };
}

function number(name, value) {
  if (typeof value !== "number") throw new TypeError(`component \`${name}\` is ${JSON.stringify(value)}; expected a number`);
  return value;
}
