// Why there is no style distribution.

export class ClassifyError extends Error {
  constructor(failure) {
    super(failure ? `the style model gave no answer: ${failure.message}` : "the run has no style model");
    this.name = "ClassifyError";
    this.failure = failure;
  }
}
