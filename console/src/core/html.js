/** Templates of components: text stays text, because Preact creates nodes and never parses HTML. */
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);
