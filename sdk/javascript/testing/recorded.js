// Host functions that return the results recorded in golden cases and in episodes.jsonl.

import { HostCallError } from "../host.js";
import { CallFailure } from "../types.js";

/** Names of the functions in a recording by those of `host`. */
const RECORDED_NAMES = {
  count: "count_tokens",
  split: "split_tokens",
  segment: "segment_words",
  embed: "embed",
  ask: "ask_judge",
  classify: "classify_style",
};

/** A receiver that returns the result of the first recorded call with the same request. Other calls fail with `not_recorded`. */
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
    // Recorded vectors are f32, printed with the shortest digits that identify the f32 value.
    return form === "vectors" ? value.map((vector) => vector.map(Math.fround)) : value;
  };
}
