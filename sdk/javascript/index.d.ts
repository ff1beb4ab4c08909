/** Who asks, and what was said before. Empty texts where unknown. */
export interface Context {
  /** 用户画像. */
  userProfile: string;
  /** 历史摘要. */
  historySummary: string;
}

/** One retrieved passage. */
export interface Hit {
  /** Id of the passage. Empty where the retrieval service sends none. */
  id: string;
  text: string;
  /** How well the passage answers the original query in its context, 0 to 1. */
  rerankerScore: number;
  /** First-stage score, where known; its scale is the index's own. */
  retrievalScore: number | undefined;
  /** 1 for the best. */
  rank: number;
}

/** The sorts of failure of an outside call. */
export type FailureKind =
  | "timeout"
  | "unreachable"
  | "unauthorized"
  | "rejected"
  | "rate_limited"
  | "server_error"
  | "invalid_response"
  | "not_recorded";

/** Why an outside call gave no answer. Never to be read as a low value. */
export class CallFailure {
  constructor(kind: FailureKind, message?: string);
  kind: FailureKind;
  /** One sentence for a person. Its wording may change: do not parse it. */
  message: string;
}

/** A judge's score of one rewrite. */
export interface JudgeScore {
  /** 综合得分, 0 to 5. */
  score: number;
  /** Why, in words. */
  reason: string;
}

/** One class of a style distribution; the probabilities sum to 1. */
export interface StyleProbability {
  label: string;
  probability: number;
}

/** One side of the competition: the policy's rewrite, or the teacher's. */
export class Candidate {
  constructor(fields?: Partial<Pick<Candidate, "rewrite" | "retrieval" | "judgement" | "style" | "nTokens" | "truncated">>);
  /** The rewrite, parsed. */
  rewrite: string;
  /** Its hits, best first, or why there are none. An empty list is an answer: nothing was found. */
  retrieval: Hit[] | CallFailure;
  /** What the judge said of it, or why it said nothing; `undefined` where nobody asked it. */
  judgement: JudgeScore | CallFailure | undefined;
  /** Style distribution, where a style model is configured. */
  style: StyleProbability[] | undefined;
  /** Tokens generated, end of sequence included; 0 where unknown. */
  nTokens: number;
  /** True where the token limit cut the answer off. */
  truncated: boolean;
  /** Its hits; a failed call is thrown as the rejection `SIDE_retrieval_failed`. */
  hits(side: string): Hit[];
  /** What the judge said, `undefined` where nobody asked; a failed call is thrown as `SIDE_judgement_failed`. */
  judged(side: string): JudgeScore | undefined;
}

/** Everything that a reward may look at. */
export class Episode {
  constructor(fields?: Partial<Episode>);
  /** Unique in a run. */
  id: string;
  /** What the user typed. */
  query: string;
  context: Context;
  /** Ids of passages known to answer the query; empty where unknown. */
  goldIds: string[];
  /** The policy's side. */
  policy: Candidate;
  /** The teacher's side. */
  baseline: Candidate;
}

/** A row whose rewrite and retrieval both succeeded. */
export interface Sample {
  /** Id of the row, unique in the batch. */
  id: string;
  /** What the user typed. */
  originalQuery: string;
  /** The teacher's rewrite. */
  rewrittenQuery: string;
  context: Context;
  /** Hits of the rewrite, best first; empty where nothing was found. */
  hits: Hit[];
}

/** The score of one episode, or of one dialogue's style. */
export interface Score {
  /** Finite, and within the range that the plugin declares; 0 to 1 for a style. */
  total: number;
  /** Named parts, finite; they need not sum to the total. Names: 1 to 64 of `a` to `z`, `0` to `9`, `_`. */
  components?: Record<string, number>;
}

/** Who speaks in a chat message. */
export type Role = "system" | "user" | "assistant";

/** A chat message. */
export class Message {
  constructor(role: Role, content: string);
  role: Role;
  content: string;
  static system(content: string): Message;
  static user(content: string): Message;
  static assistant(content: string): Message;
}

/** What a prompt is made for. */
export type PromptTask =
  /** The teacher's prompt: long, with the tenant's rules. */
  | "teacher_rewrite"
  /** The policy's prompt: short; the model learns the rules in training. */
  | "policy_rewrite"
  /** The judge's prompt. The answer to it goes to `parseJudgement`. */
  | "judge";

/** What goes into a prompt. */
export interface PromptInput {
  /** What the user typed. */
  query: string;
  context: Context;
  /** The rewrite to judge; `undefined` in the rewrite tasks. */
  rewrite: string | undefined;
}

/** A dialogue whose last turn, the assistant's, is to be scored. */
export interface Dialogue {
  /** Unique in a run. */
  id: string;
  turns: Message[];
}

/** The style model of the run. In a test, any stand-in with this method. */
export interface StyleModel {
  /**
   * The distribution over the model's classes, one entry per class, in the model's order.
   * @throws {ClassifyError} There is no model, or no answer.
   */
  classify(turns: Message[]): StyleProbability[];
}

/** There is no style distribution: the model failed, or, without `failure`, the run has no style model. */
export class ClassifyError extends Error {
  constructor(failure?: CallFailure);
  failure: CallFailure | undefined;
}

/** Thrown where a plugin has no answer for one item. The item is dropped and counted; it is not an answer of 0. */
export class Rejection extends Error {
  /**
   * @param code For counting: 1 to 64 of `a` to `z`, `0` to `9`, `_`; stable over versions.
   * @param detail One sentence for a person; may be empty.
   */
  constructor(code: string, detail?: string);
  code: string;
  detail: string;
}

/** Thrown for a setting that cannot be used: `problem` says what was expected and what came. */
export class SettingError extends Error {
  constructor(key: string, problem: string);
  key: string;
  problem: string;
}

/** Both ends count as inside. */
export interface Bounds {
  minimum?: number;
  maximum?: number;
}

/**
 * The user's settings for this plugin, each a text. In a component they come from the host; in a test they are given:
 * `new Settings({ max_chars: 10 })`. Every reader but `get` and `text` throws a {@link SettingError} for an unusable value.
 */
export class Settings {
  constructor(values?: Record<string, unknown>);
  /** The text under `key`; `undefined` where the user set nothing. */
  get(key: string): string | undefined;
  /** The text under `key`, or `fallback`. */
  text(key: string, fallback: string): string;
  /** One of `choices` under `key`, or `fallback`. */
  choice<T extends string>(key: string, fallback: T, choices: readonly T[]): T;
  /** The number under `key`, or `fallback`. */
  number(key: string, fallback: number, bounds?: Bounds): number;
  /** The whole number under `key`, or `fallback`. */
  integer(key: string, fallback: number, bounds?: Bounds): number;
  /** The truth value under `key`, or `fallback`. */
  flag(key: string, fallback: boolean): boolean;
  /** The list of texts under `key`, or `fallback`. */
  texts(key: string, fallback?: readonly string[]): string[];
}

/**
 * Scores what the policy wrote against what the teacher wrote. One object is made for each call and scores the episodes of a
 * batch one by one: a score depends on its episode and the settings only. The constructor reads every setting.
 */
export interface Reward {
  /** The lowest and the highest total under these settings. */
  range(): [number, number];
  /**
   * Scores one episode.
   * @throws {Rejection} It cannot be scored. That is not a score of 0, which means a draw.
   */
  score(episode: Episode): Score;
}

/** Keeps samples in the training data or drops them. One object is made for each batch, which is one whole split. */
export interface Filter {
  /**
   * Returns nothing to keep the sample. What it remembers of the samples before it in the batch may count.
   * @throws {Rejection} The sample is dropped, for this reason.
   */
  check(sample: Sample): void;
}

/** A tenant's prompts, and the parsing of answers to them. */
export interface Prompt {
  /** The conversation for one task: the last message is the user's, a system message stands only at the start. */
  messages(task: PromptTask, input: PromptInput): Message[];
  /**
   * The rewrite in a model's answer, never blank.
   * @throws {Rejection} There is none.
   */
  parseRewrite(text: string): string;
  /**
   * The judgement in a judge's answer.
   * @throws {Rejection} There is none, or its score is not within 0 to 5: never a guess.
   */
  parseJudgement(text: string): JudgeScore;
}

/** Scores the style of the last turn of a dialogue. */
export interface StyleScorer {
  /**
   * Scores one dialogue, 0 (worst) to 1 (best).
   * @throws {Rejection} It cannot be scored. That is not a score of 0.
   */
  score(dialogue: Dialogue, model: StyleModel): Score;
}

type From<T> = new (settings: Settings) => T;

/** The classes of a plugin, one for each kind that it has. */
export interface Classes {
  prompt?: From<Prompt>;
  filter?: From<Filter>;
  reward?: From<Reward>;
  styleScorer?: From<StyleScorer>;
}

/** What `plugin.js` exports by default. */
export interface Plugin {
  /** By the names that plugin.toml has for kinds. */
  readonly kinds: Readonly<Record<string, From<unknown>>>;
}

/** Says what the plugin is made of: `export default plugin({ reward: Brevity })` in `plugin.js`. */
export function plugin(classes: Classes): Plugin;

/** Characters (code points) of a text. `[...text].length` gives the same and costs a component thousands of instructions a character. */
export function nChars(text: string): number;

/** The text without these characters at its two ends; as `nChars`, for long texts. */
export function stripped(text: string, characters: string): string;

/** Lines for a person who is looking for a mistake: in a component to the host's log, natively to stderr. No result depends on them. */
export const log: Record<"debug" | "info" | "warn" | "error", (message: string) => void>;
