"""Import trainer-controller files; docs/rules-ibm.md lists every translation.

In a training that reports events and metrics as docs/rules-ibm.md requires, the rules decide as the original does.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from baton.contract.errors import Fault
from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.language.faults import Code, ExpressionError
from baton.contract.yaml_documents import Document, Location, read_document, write_document
from gpu_client.importers.ibm.expressions import translate_expression
from gpu_client.importers.ibm.files import ACTIONS, EVENTS, LEVELS, Controller, FileReader, LogFormat
from gpu_client.importers.ibm.log_formats import FormatNames, translate_format
from gpu_client.importers.ibm.metrics import FINAL_SAVE, MetricSource

_LINE = "step {step:d}, epoch {epoch:.2f}, loss {loss}"
"""Log line for `should_log`, for which the original lets the trainer log all its values."""
_SEVERITIES = ("info", "warning", "error")


class Imported(NamedTuple):
    """Imported rules and their document, or faults. Notes leave the rules usable."""

    text: str
    rules: RuleSet | None
    faults: list[Fault]
    notes: list[Fault]
    """Omitted and differing parts, with line and column of the file."""


def import_ibm(text: str) -> Imported:
    """Import a trainer-controller file. Never raises."""
    document = read_document(text)
    if document.faults:
        faults = [fault if fault.code else fault._replace(code=Code.UNREADABLE) for fault in document.faults]
        return Imported("", None, faults, [])
    return _Importer(document).imported()


class _Importer:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._notes = Document(places=document.places, texts=document.texts)
        self._final = False
        self._unsound = False
        self._names: set[str] = set()

    def imported(self) -> Imported:
        reader = FileReader(self._document, self._notes)
        controllers = reader.controllers()
        self._unsound = bool(reader.unsound)
        rules = [self._rule(controller, reader.sources) for controller in controllers]
        if self._document.faults:
            return self._result("", None)
        value: dict[str, Any] = {"version": 1}
        if self._final:
            value["metrics"] = {FINAL_SAVE: {"kind": "bool"}}
        text = write_document({**value, "rules": rules})
        loaded = load(text)
        for faults, place in ((self._document, loaded.faults), (self._notes, loaded.warnings)):
            for fault in place:
                self._report_in_file(faults, fault, controllers)
        return self._result(text, loaded.rules)

    def _result(self, text: str, rules: RuleSet | None) -> Imported:
        faults, notes = (
            sorted(dict.fromkeys(one.faults), key=lambda fault: (fault.line or 0, fault.column or 0))
            for one in (self._document, self._notes)
        )
        return Imported("" if faults else text, None if faults else rules, faults, notes)

    def _report_in_file(self, into: Document, fault: Fault, controllers: list[Controller]) -> None:
        """Report a fault of the translation at its controller in the file."""
        found = re.match(r"rules\.([0-9]+)\.(when|do)", fault.field)
        place: Location = ("controllers",)
        if found:
            place = (*controllers[int(found[1])].place, "rule" if found[2] == "when" else "operations")
        into.fault(place, f"{fault.reason} (of its translation)", fault.remedy, code=fault.code)

    def _rule(self, controller: Controller, sources: dict[str, MetricSource]) -> dict[str, Any]:
        events = [EVENTS[event] for event in controller.events]
        rule: dict[str, Any] = {
            "name": self._name(controller),
            "on": events[0] if len(events) == 1 else events,
            "when": self._when(controller, sources),
        }
        if controller.patience:
            needed = controller.patience + 1
            rule["for"] = f"{needed} checks" if controller.resets else f"{needed} of all"
            if len(events) > 1:
                reason = f"patience is one for all its {len(events)} triggers; the original counts each by itself"
                remedy = "Make a controller for each trigger, if each is to be counted by itself."
                self._notes.fault((*controller.place, "patience"), reason, remedy, code=Code.DIFFERS)
        # The original fires at every true check, therefore the cooldown is one check.
        rule["cooldown"] = "1 check"
        formats = [form for _, _, form in controller.operations if form is not None]
        if formats and len(formats) == len(controller.operations):
            rule["severity"] = max((LEVELS[form.level] for form in formats), key=_SEVERITIES.index)
        rule["do"] = [self._action(controller, sources, *operation) for operation in controller.operations]
        return rule

    def _name(self, controller: Controller) -> str:
        plain = re.sub(r"[^a-z0-9_-]+", "-", controller.name.lower()).strip("-_")[:56] or "rule"
        name, number = plain, 1
        while name in self._names:
            number += 1
            name = f"{plain}-{number}"
        self._names.add(name)
        if name != controller.name:
            reason = f"is called {name} here"
            remedy = "Use lower-case letters, digits, '-' and '_', and each name once."
            self._notes.fault((*controller.place, "name"), reason, remedy, code=Code.DIFFERS)
        return name

    def _when(self, controller: Controller, sources: dict[str, MetricSource]) -> str:
        place = (*controller.place, "rule")
        saves = {event == "on_save" for event in controller.events}
        try:
            found = translate_expression(
                controller.rule,
                sources,
                resets=controller.resets and controller.patience > 0,
                saves_only=None if len(saves) > 1 else saves != {False},
            )
        except ExpressionError as error:
            # A metric with a faulty definition is also missing, therefore only the first fault is reported.
            if error.code is not Code.UNKNOWN_METRIC or not self._unsound:
                self._document.text_fault(place, error.offset, error.reason, error.remedy, code=error.code)
            return ""
        for offset, reason in found.differs:
            remedy = "Compare the length with the window's size."
            self._notes.text_fault(place, offset, reason, remedy, code=Code.DIFFERS)
        if found.final:
            self._final = True
            reason = f"is_final becomes {FINAL_SAVE}, which no adapter reports: it stays false"
            remedy = "Use on_train_end with another rule, or report it with each save from a loop of your own."
            self._notes.fault(place, reason, remedy, code=Code.DIFFERS)
        return found.text

    def _action(
        self,
        controller: Controller,
        sources: dict[str, MetricSource],
        place: Location,
        action: str,
        form: LogFormat | None,
    ) -> Any:
        if form is not None:
            return {"log": self._text(controller, sources, form)}
        if action == "should_training_stop":
            return {"stop": {"save": False}}
        if action == "should_log":
            reason = "a line with step, epoch and loss is written; the trainer itself is not asked to log"
            self._notes.fault(place, reason, "Write the line's text in 'log'.", code=Code.DIFFERS)
            return {"log": _LINE}
        return ACTIONS[action]

    def _text(self, controller: Controller, sources: dict[str, MetricSource], form: LogFormat) -> str:
        def differs(offset: int, reason: str) -> None:
            remedy = "Name the values: {step:d}, {loss:.3f}."
            self._notes.text_fault(form.place, offset, reason, remedy, code=Code.DIFFERS)

        try:
            return translate_format(form.text, FormatNames(sources, controller.name, controller.events), differs)
        except ExpressionError as error:
            self._document.text_fault(form.place, error.offset, error.reason, error.remedy, code=error.code)
            return ""
