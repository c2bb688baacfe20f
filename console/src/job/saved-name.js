/** Names of saved files. Pure. */

/** Characters that end a path, name a drive or a stream, or turn the direction of the text around. */
const UNSAFE = /[\\:*?"<>|\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Return the name under which a file of `path` is saved: its last part, without a way into another directory. */
export function savedName(path) {
  const name = path.split("/").at(-1).replace(UNSAFE, "_").replace(/^\.+/, "_").replace(/[. ]+$/, "_");
  return name || "file";
}
