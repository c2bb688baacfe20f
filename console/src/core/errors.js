/** Refusals of the API, and a control plane that cannot be reached. */

export class ApiError extends Error {
  /** `status` 0: no answer came. `code` is stable; `message` ends with the remedy. */
  constructor({ status, code, message, field, problems, retry_after_s }) {
    super(message);
    Object.assign(this, { status, code, field, problems, retry_after_s });
  }

  /** Make the error of a request without an answer. */
  static unreachable(cause) {
    const error = new ApiError({ status: 0, code: "unreachable", message: "The control plane does not answer." });
    error.cause = cause;
    return error;
  }

  /** Return true if a later repetition may succeed: no answer, an outage, or too many requests. */
  get passing() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Return the JSON of an answer. Throws ApiError: a connection can break within an answer, and a proxy can answer in place of the API. */
export async function jsonOf(answer) {
  try {
    return await answer.json();
  } catch (cause) {
    throw ApiError.unreachable(cause);
  }
}

/** Read the refusal in an answer. The gateway's own answers have only `message`. */
export async function refusalIn(answer) {
  const retry_after_s = Number(answer.headers.get("retry-after")) || undefined;
  const fallback = { code: `http_${answer.status}`, message: `The control plane answered ${answer.status}.` };
  let body = null;
  try {
    body = await answer.json();
  } catch {
    // An answer of a proxy, not of the API: the status says all.
  }
  const said = body?.error?.code ? body.error : { ...fallback, ...(body?.message && { message: body.message }) };
  return new ApiError({ ...said, status: answer.status, retry_after_s });
}
