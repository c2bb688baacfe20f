"""Calls about rules and live commands."""

from __future__ import annotations

import uuid

from baton.contract.rule_calls import RulesHistory, RulesRequest, RulesView
from baton.contract.steering import Command, CommandList, CommandRequest
from gpu_client.transport.calls import ApiCalls, read_answer, segment


class SteeringCalls(ApiCalls):
    """Steering a job while it runs, or before."""

    def put_rules(self, job_id: str, text: str, *, if_revision: int | None = None) -> RulesView:
        """Give a job its next revision of rules; the same text again is fine."""
        body = RulesRequest(text=text, if_revision=if_revision)
        return read_answer("put_rules", self._send("put_rules", "PUT", _rules(job_id), body=body), RulesView)

    def rules(self, job_id: str) -> RulesView:
        """The newest rules of a job, and what its worker said last of them."""
        return read_answer("rules", self._send("rules", "GET", _rules(job_id)), RulesView)

    def rules_history(self, job_id: str, *, limit: int = 20, cursor: str | None = None) -> RulesHistory:
        """One page of their revisions, newest first."""
        query = {"limit": limit, "cursor": cursor}
        answer = self._send("rules_history", "GET", f"{_rules(job_id)}/history", query=query)
        return read_answer("rules_history", answer, RulesHistory)

    def command(self, job_id: str, request: CommandRequest, *, idempotency_key: str | None = None) -> Command:
        """Give a command to a job's training, once: each call makes its own key, as `submit` does."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        path = f"/job/{segment(job_id)}/commands"
        return read_answer("command", self._send("command", "POST", path, body=request, headers=headers), Command)

    def commands(self, job_id: str) -> CommandList:
        """The commands that a job was given, newest first."""
        path = f"/job/{segment(job_id)}/commands"
        return read_answer("commands", self._send("commands", "GET", path), CommandList)


def _rules(job_id: str) -> str:
    return f"/job/{segment(job_id)}/rules"
