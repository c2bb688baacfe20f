"""Reading of the control plane: a list of several pages, and a page's own fault while it follows data."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from cdk import NODE

CORE = Path(__file__).parents[3] / "console" / "src" / "core"
# A signed-in page whose control plane knows five items, and answers with two of them at most.
_PAGE = """
  globalThis.document = { hidden: false, addEventListener() {} };
  const asked = [];
  globalThis.fetch = async (path) => {
    asked.push(path);
    const begin = Number(new URLSearchParams(path.split("?")[1]).get("cursor") ?? 0);
    const end = Math.min(5, begin + 2);
    const items = Array.from({ length: end - begin }, (_, index) => begin + index);
    return Response.json({ items, next_cursor: end < 5 ? String(end) : null, final: end === 5 });
  };
  const [{ session }, api, polling] = await Promise.all(process.argv.slice(1).map((place) => import(place)));
  session.value = { state: "in", token: "t", expires_at: Infinity, scopes: ["submit"] };
"""


def run(program: str) -> Any:
    """Run a program in the page, and return the object that the program prints."""
    places = [(CORE / name).as_uri() for name in ("session.js", "api.js", "polling.js")]
    line = [str(NODE), "--input-type=module", "-e", _PAGE + program, *places]
    return json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


def test_a_list_is_read_to_its_last_page() -> None:
    found = run('console.log(JSON.stringify({ page: await api.getPages("/list", "items", 9), asked }));')
    assert found["page"] == {"items": [0, 1, 2, 3, 4], "next_cursor": None, "final": True}
    assert found["asked"] == ["/list?limit=1000", "/list?limit=1000&cursor=2", "/list?limit=1000&cursor=4"]


def test_a_list_that_is_longer_than_the_bound_says_so() -> None:
    found = run('console.log(JSON.stringify(await api.getPages("/list", "items", 2)));')
    assert (found["items"], found["next_cursor"]) == ([0, 1, 2, 3], "4")


def test_a_fault_of_the_page_does_not_end_the_requests() -> None:
    """An answer that a view does not expect makes a TypeError, which is no refusal."""
    found = run("""
      const faults = [];
      process.on("unhandledRejection", (fault) => faults.push(fault.message));
      let reads = 0;
      globalThis.setTimeout = (next) => reads < 3 && queueMicrotask(next);
      const poller = new polling.Poller(async () => {
        reads += 1;
        if (reads < 3) throw new TypeError("not a list");
        return true;
      });
      await new Promise((done) => poller.follow(done));
      await new Promise(setImmediate);
      console.log(JSON.stringify({ faults, reads }));
    """)
    assert found == {"faults": ["not a list", "not a list"], "reads": 3}
