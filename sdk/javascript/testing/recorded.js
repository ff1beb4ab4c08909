// Host functions with recorded results, as golden cases and the lines of recorded episodes have them.

import { HostCallError } from "../host.js";
import { CallFailure } from "../types.js";

/** Functions in a recording, by the method that calls them. */
const RECORDED_NAMES = {
  count: "count_tokens",
  split: "split_tokens",
  segment: "segment_words",
  embed: "embed",
  ask: "ask_judge",
  classify: "classify_style",
};

/** Answers a call with the result of the first recorded one that is equal; what was not recorded fails. */
export function recorded(calls) {
  const plain = (each) => (typeof each === "string" ? each : { role: each.role, content: each.content });
  const key = (name, argument) => JSON.stringify([name, Array.isArray(argument) ? argument.map(plain) : argument]);
  const responses = calls.map(({ request, response }) => [key(...Object.entries(request)[0]), response]);
  return (functions, method, argument) => {
    const wanted = key(RECORDED_NAMES[method], argument);
    const [, response] = responses.find(([key]) => key === wanted) ?? [];
    if (response === undefined) {
      throw new HostCallError(functions, new CallFailure("not_recorded", "the recording has no result for this call"));
    }
    if ("Err" in response) {
      const failed = response.Err.failed;
      throw new HostCallError(functions, failed && new CallFailure(failed.kind, failed.message));
    }
    const [[form, value]] = Object.entries(response.Ok);
    // The recording has the shortest digits of f32.
    return form === "vectors" ? value.map((vector) => vector.map(Math.fround)) : value;
  };
}
