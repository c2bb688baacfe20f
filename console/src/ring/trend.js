/** What this page has seen of rings, for rates. The series stay while the reader goes to another view and back. */
import { useEffect, useState } from "preact/hooks";
import { now_s } from "../core/clock.js";
import { addSample, sampleOf } from "./ring-data.js";

const NONE = [];
const series = new Map();

/** Add a sample of each ring of `rings` (`{id, ring}`) after each change of `data`; returns the samples of a ring by id. */
export function useTrends(rings, data) {
  const [, render] = useState(0);
  useEffect(() => {
    for (const { id, ring } of rings) series.set(id, addSample(series.get(id) ?? NONE, sampleOf(ring, now_s())));
    render((times) => times + 1);
  }, [data]);
  return (id) => series.get(id) ?? NONE;
}
