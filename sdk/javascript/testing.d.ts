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

/** Hits with these reranker scores, ranked in this order. */
export function hits(...scores: number[]): Hit[];

/** A failed call, for `retrieval` or `judgement`. */
export function failed(message?: string, kind?: FailureKind): CallFailure;

/** A rewrite, the scores of its hits (or a failed call), the judge's score (or a failed call). What is left out is unknown. */
export function candidate(
  rewrite?: string,
  scores?: number[] | CallFailure,
  more?: { judged?: number | CallFailure; style?: Record<string, number>; nTokens?: number; finishReason?: string },
): Candidate;

/** An episode; a side given as a text is a rewrite that was not looked up and not judged. */
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

/** The episode with the parts that a plugin's class declares and no others, as the host gives it. */
export function declared(episode: Episode, type: { requires?: readonly Input[]; uses?: readonly Input[] }): Episode;

/**
 * Calls `run` with stand-ins for host functions, and returns its result. Without one, tokens and words are the units of `text.units`,
 * vectors counts of characters, and judge and style model not configured.
 */
export function withHostFunctions<T>(standIns: Partial<typeof host>, run: () => T): T;

/** A sample with hits of these reranker scores. */
export function sample(query: string, rewrite: string, scores?: number[], columns?: Columns): Sample;

/** A dialogue whose turns alternate and end with the assistant's. */
export function dialogue(...texts: string[]): Dialogue;

/** A style model that always says the same: a distribution by label, a failure, or, without either, that there is none. */
export function styleModel(probabilities?: Record<string, number>, failure?: CallFailure): StyleModel;

/** The episodes of a file that a run recorded (`episodes.jsonl`) or somebody wrote by hand. */
export function readEpisodes(path: string | URL): Episode[];

/** One golden case: what is sent and what must come back. */
export interface GoldenCase {
  /** File and line. */
  place: string;
  name: string;
  about: "episode" | "episodes" | "samples" | "task" | "parse_rewrite" | "parse_judgement" | "dialogue";
  settings: Record<string, unknown>;
  sent: unknown;
  input: unknown;
  styleModel: unknown;
  /** The results of host functions; another call fails as not recorded. */
  calls: { request: Record<string, unknown>; response: { Ok: Record<string, unknown> } | { Err: unknown } }[];
  expect: unknown;
}

/** The cases of a folder, in the order of files and lines. */
export function readGolden(folder: string | URL): GoldenCase[];

/** Runs the cases of a folder, each with a new object, and says how many there were. Throws for one that does not hold. */
export function checkGolden(plugin: Plugin, folder: string | URL): number;

/**
 * Sends odd but lawful input of every sort to a plugin's classes and checks what comes back. What it throws says what was sent,
 * what came back and what the contract says.
 */
export function checkContract(plugin: Plugin, settings?: Record<string, unknown>): void;
