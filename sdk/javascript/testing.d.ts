import type {
  CallFailure,
  Candidate,
  Columns,
  Dialogue,
  Episode,
  FailureKind,
  Hit,
  host,
  Input,
  Message,
  Plugin,
  Sample,
  StyleModel,
} from "./index.js";

/** Hits with these reranker scores and the ranks 1, 2, 3, ... */
export function hits(...scores: number[]): Hit[];

/** A failed call, for `retrieval` or `judgement`. */
export function failed(message?: string, kind?: FailureKind): CallFailure;

/** A rewrite with the reranker scores of its hits (or a failed call) and the judge's score (or a failed call). Omitted values are unknown. */
export function candidate(
  rewrite?: string,
  scores?: number[] | CallFailure,
  more?: { judged?: number | CallFailure; style?: Record<string, number>; nTokens?: number; finishReason?: string },
): Candidate;

/** An episode. A string as `policy` or `baseline` is a rewrite without retrieval and judge score. */
export function episode(
  query?: string,
  policy?: Candidate | string,
  baseline?: Candidate | string,
  more?: {
    response?: string;
    columns?: Columns;
    prompt?: Message[];
    userProfile?: string;
    historySummary?: string;
    goldIds?: string[];
    sampleIndex?: number;
  },
): Episode;

/** The episode with only the inputs that a plugin's class declares, as the host passes it. */
export function declared(episode: Episode, type: { requires?: readonly Input[]; uses?: readonly Input[] }): Episode;

/**
 * Calls `run` with replacements for host functions, and returns its result. Defaults: tokens and words are `text.units`, embeddings are
 * character counts, and judge and style model are not configured.
 */
export function withHostFunctions<T>(standIns: Partial<typeof host>, run: () => T): T;

/** A sample with hits of these reranker scores. */
export function sample(query: string, rewrite: string, scores?: number[], columns?: Columns): Sample;

/** A dialogue with alternating roles that ends with an assistant turn. */
export function dialogue(...texts: string[]): Dialogue;

/** A style model with a constant result: class probabilities, a failed call, or (without arguments) "not configured". */
export function styleModel(probabilities?: Record<string, number>, failure?: CallFailure): StyleModel;

/** Reads the episodes of an `episodes.jsonl`, recorded by a run or written by hand. */
export function readEpisodes(path: string | URL): Episode[];

/** One golden case: the input of a call and the expected result. */
export interface GoldenCase {
  /** File and line. */
  place: string;
  name: string;
  about: "episode" | "episodes" | "samples" | "task" | "parse_rewrite" | "parse_judgement" | "dialogue";
  settings: Record<string, unknown>;
  sent: unknown;
  input: unknown;
  styleModel: unknown;
  /** Recorded results of host functions. Any other call fails with `not_recorded`. */
  calls: { request: Record<string, unknown>; response: { Ok: Record<string, unknown> } | { Err: unknown } }[];
  expect: unknown;
}

/** Reads the cases of a folder, in the order of files and lines. */
export function readGolden(folder: string | URL): GoldenCase[];

/** Runs the cases of a folder, each with a new object. Returns their number; throws for the first that fails. */
export function checkGolden(plugin: Plugin, folder: string | URL): number;

/**
 * Calls a plugin's classes with unusual but valid inputs and checks the results against the contract. Throws an error with the input, the
 * result and the violated rule.
 */
export function checkContract(plugin: Plugin, settings?: Record<string, unknown>): void;
