import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "../core/html.js";

const MARGIN_ROWS = 10;
const NEAR_END_ROWS = 30;

/**
 * Table of any length: only the rows on the screen are in the document.
 *
 * `columns`: `{name, label}`. `row(item)`: the cells of one row. `onVisible(first, last)` is called after scrolling,
 * `onEnd` when the end is near, again after each change of `loaded`. All rows are `rowHeight` pixels high, so their number alone gives the positions.
 */
export function VirtualTable({ label, columns, items, keyOf, rowHeight, row, total, loaded, onVisible, onEnd, footer }) {
  const scroller = useRef(null);
  const [range, setRange] = useState({ first: 0, last: 40 });

  const measure = () => {
    // A last scroll event may come after the table has left the document.
    if (!scroller.current) return;
    const { scrollTop, clientHeight } = scroller.current;
    const first = Math.max(0, Math.floor(scrollTop / rowHeight) - MARGIN_ROWS);
    const last = Math.ceil((scrollTop + clientHeight) / rowHeight) + MARGIN_ROWS;
    setRange((old) => (old.first === first && old.last === last ? old : { first, last }));
  };
  useLayoutEffect(measure, [rowHeight]);
  useEffect(() => {
    const observer = new ResizeObserver(measure);
    observer.observe(scroller.current);
    return () => observer.disconnect();
  }, [rowHeight]);
  useEffect(() => {
    onVisible?.(range.first, range.last);
    if (range.last >= items.length - NEAR_END_ROWS) onEnd?.();
  }, [range.first, range.last, items.length, loaded]);

  const moveFocus = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!step || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    const current = Number(event.target.closest("[data-index]")?.dataset.index ?? -1);
    const index = Math.max(0, Math.min(items.length - 1, current + step));
    const place = scroller.current;
    const top = index * rowHeight;
    if (top < place.scrollTop) place.scrollTop = top;
    else if (top + 2 * rowHeight > place.scrollTop + place.clientHeight) {
      place.scrollTop = top + 2 * rowHeight - place.clientHeight;
    }
    place.querySelector(`[data-index="${index}"] a`)?.focus({ preventScroll: true });
  };

  const shown = items.slice(range.first, range.last);
  return html`<div class="table" ref=${scroller} onScroll=${measure} onKeyDown=${moveFocus} role="group" tabindex="0" aria-label="${label}, scrollable">
    <div role="table" aria-label=${label} aria-rowcount=${total ?? items.length + 1}>
      <div role="rowgroup" class="table-heads"><div class="table-head" role="row" aria-rowindex="1">
        ${columns.map((one) => html`<div key=${one.name} role="columnheader" class="cell cell-${one.name}">${one.label}</div>`)}
      </div></div>
      <div class="table-rows" role="rowgroup" style=${{ height: `${items.length * rowHeight}px` }}>
        ${shown.map((item, offset) => {
          const index = range.first + offset;
          const place = { transform: `translateY(${index * rowHeight}px)`, height: `${rowHeight}px` };
          return html`<div key=${keyOf(item)} class="table-row" role="row" aria-rowindex=${index + 2} data-index=${index} style=${place}>
            ${row(item)}
          </div>`;
        })}
      </div>
    </div>
    ${footer}
  </div>`;
}
