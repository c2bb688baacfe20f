/** Values that components follow. */
import { useEffect, useState } from "preact/hooks";

/** Make a value with `subscribe`; an assignment to `value` tells all followers. */
export function signal(value) {
  const followers = new Set();
  return {
    get value() {
      return value;
    },
    set value(next) {
      if (Object.is(next, value)) return;
      value = next;
      for (const follow of [...followers]) follow(next);
    },
    subscribe(follow) {
      followers.add(follow);
      return () => followers.delete(follow);
    },
  };
}

/** Return a signal's value, and render the component again when the value changes. */
export function useSignal(source) {
  const [value, set] = useState(source.value);
  useEffect(() => {
    set(source.value);
    return source.subscribe((next) => set(() => next));
  }, [source]);
  return value;
}
