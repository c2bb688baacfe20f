"""Format events of rules, presets and damaged ring objects as text."""

from __future__ import annotations

from typing import Any

from baton.contract.jobs.history import EventType, EventView
from baton.contract.rules.document import presets


def is_preset_event(event: EventView) -> bool:
    """Return True for the firing or clearing of a preset."""
    return event.data.get("rule") in presets.NAMES and event.type in (EventType.RULE_FIRED, EventType.RULE_CLEARED)


def preset_line(event: EventView) -> str:
    """Return `preset-stuck: no step for 14 min, usual 0.4 s`."""
    return f"{event.data['rule']}: {event.data.get('message') or 'cleared'}"


def line_of(event: EventView) -> str:
    """Return `step 120: rule spike fired: loss = 7.25 (rollback)`."""
    data = event.data
    if is_preset_event(event):
        return f"step {data.get('step')}: {preset_line(event)}"
    if event.type is EventType.RING_QUARANTINED:
        count = f" ({data['objects']:,} objects so far)" if _is_several(data.get("objects")) else ""
        return f"step {data.get('step')}: ring {data.get('ring')}: quarantined{count}: {data.get('message')}"
    source = f"rule {data['rule']}" if data.get("rule") else "rules"
    source = f"command {data['command']}" if data.get("command") else source
    word = {EventType.ROLLED_BACK: f"rolled back to step {data.get('to_step')}"}.get(
        event.type, event.type.value.partition(".")[2]
    )
    if event.type.value.startswith("action."):
        word = f"{', '.join(data.get('actions', []))} {word}"
    dry = " (dry run)" if data.get("dry_run") else ""
    parts = [f"{text} = {_format_value(value)}" for text, value in dict(data.get("operands") or {}).items()]
    parts += [str(data["message"])] if data.get("message") else []
    line = f"step {data.get('step')}: {source} {word}{dry}"
    return f"{line}: {', '.join(parts)}" if parts else line


def _is_several(objects: object) -> bool:
    return isinstance(objects, int) and objects > 1


def _format_value(value: Any) -> str:
    return "unknown" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
