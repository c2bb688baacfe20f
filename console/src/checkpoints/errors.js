/** Why a checkpoint's file is not saved, for the reader. */
export class DownloadError extends Error {
  constructor(reason) {
    super(`${reason} Nothing was saved.`);
  }
}
