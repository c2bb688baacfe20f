"""Rules in a session of one process: from a file or an agent, at the step itself, and across interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from listening_agent import ListeningAgent
from session_helpers import Counter

from baton import Session, SessionError
from gpu_client.controller.steering import Steering
from gpu_client.training.checkpoint.checkpoint_directory import read_marker, verify
from tests.kits.clock import Clock

NAN = "rules: [{name: nan, when: not isfinite(loss), do: {stop: failed}}]"


def begun(tmp_path: Path, rules: str | None = None, *, resume: bool = False, **variables: str) -> Session:
    file = None
    if rules is not None:
        file = tmp_path / "rules.yaml"
        file.write_text(rules)
    return Session.start(output_dir=tmp_path / "output", rules=file, resume=resume, variables=variables)


def test_a_file_of_rules_works_without_an_agent(tmp_path: Path) -> None:
    seen = []
    with begun(tmp_path, "rules: [{name: done, when: loss < 0.3, do: stop}]") as session:
        for step in range(1, 11):
            session.report(step, 10, loss=torch.tensor(1 / step))
            if session.checkpoint_due(step):
                session.checkpoint(step, counter=Counter(step))
            seen.append(step)
            if session.should_stop:
                break
        assert (session.stop_reason, session.finishing) == ("rule", True)
    assert seen[-1] == 4 and (tmp_path / "output" / "checkpoint-4").is_dir()


def test_without_an_agent_too_the_newest_checkpoint_of_each_tag_is_kept(tmp_path: Path) -> None:
    """The newest checkpoint of each tag stays; without an agent, two newer checkpoints removed it."""
    rules = """rules:
- {name: low, when: loss < 0.3, do: {save: low}}
- {name: odd, when: loss > 5, do: {save: odd}, cooldown: 1 steps}
"""
    losses = [1.0, 0.2, 1.0, 6.0, 1.0, 7.0, 1.0, 1.0, 1.0, 1.0]
    for first, last in ((1, 8), (9, 10)):
        with begun(tmp_path, rules, resume=True) as session:
            counter = Counter(0)
            session.resume(counter=counter)
            for step in range(first, last + 1):
                session.report(step, 100, loss=losses[step - 1])
                if session.checkpoint_due(step, every=1):
                    session.checkpoint(step, counter=Counter(step))
    left = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "output").glob("checkpoint-*"))
    assert left == [2, 6, 9, 10]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('rules: [{name: a, when: "mena(loss, 5) > 1", do: stop}]', "mena"),
        ("rules: 3", "rules"),
        ("[" * 9000, "nested"),
    ],
)
def test_a_file_that_is_wrong_is_refused_at_the_start(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SessionError, match=told):
        begun(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="cannot be read"):
        Session.start(output_dir=tmp_path / "o", rules=tmp_path / "none.yaml", variables={})
    (tmp_path / "rules.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SessionError, match="cannot be read"):
        Session.start(output_dir=tmp_path / "o", rules=tmp_path / "rules.yaml", variables={})
    for content in ("[]", "3", "{"):
        (tmp_path / "control.json").write_text(content)
        with pytest.raises(SessionError, match="BATON_CONTROL"):
            Session.start(output_dir=tmp_path / "o", variables={"BATON_CONTROL": str(tmp_path / "control.json")})


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("nan")), float("inf")])
def test_a_loss_that_is_no_number_is_seen_at_its_step(tmp_path: Path, step: int, value: Any) -> None:
    with begun(tmp_path, NAN) as session:
        for now in range(1, 8):
            session.report(now, 10, loss=value if now == step else 1.0)
            session.checkpoint_due(now)
            if session.should_stop:
                break
        assert now == step and not session.finishing


def test_under_an_agent_the_jobs_rules_are_taken_and_the_end_is_told(tmp_path: Path) -> None:
    control = tmp_path / "control.json"
    control.write_text(json.dumps({"rules": {"revision": 4, "text": NAN}, "commands": [], "ran_s": 0}))
    with ListeningAgent() as agent:
        variables = {"BATON_CHANNEL": agent.path, "BATON_JOB_ID": "j", "BATON_CONTROL": str(control)}
        with begun(tmp_path, "rules: nonsense", **variables) as session:
            (hello,) = agent.wait_for("hello")
            assert hello["steering"] is True
            agent.send({"type": "command", "seq": 1, "kind": "save", "arguments": {}, "expires_in_s": 60})
            step = 0
            while not agent.of("command_result"):
                step += 1
                session.report(step, 10**9, loss=1.0)
            session.report(step + 1, 10**9, loss=float("nan"))
            assert session.checkpoint_due(step + 1)
            session.checkpoint(step + 1, counter=Counter(step + 1))
            assert session.should_stop and session.stop_reason == "rule"
        agent.wait_for_end()
        (leaving,) = agent.of("leaving")
        assert leaving["ended_by"]["rule"] == "nan" and leaving["arguments"]["outcome"] == "failed"
        assert [one["revision"] for one in agent.of("rules_in_force")] == [4]


@pytest.mark.parametrize("done", [False, True], ids=["lost on the way", "carried out"])
def test_an_end_that_the_control_plane_never_heard_of_comes_after_the_next_step(tmp_path: Path, done: bool) -> None:
    """The machine was lost between the last checkpoint and the report: the rule never fired again."""
    control = tmp_path / "control.json"
    rules = {"revision": 4, "text": "rules: [{name: high, when: loss > 2, do: pause}]"}

    def attempt(first: int, losses: list[float], ends: int, **variables: str) -> tuple[int, list[Any]]:
        control.write_text(json.dumps({"rules": rules, "commands": [], "ends": ends, "ran_s": 0}))
        variables |= {"BATON_JOB_ID": "j", "BATON_CONTROL": str(control)}
        with ListeningAgent() as agent:
            with begun(tmp_path, BATON_CHANNEL=agent.path, **variables) as session:
                assert session.resume(counter=Counter()) == first - 1
                for step, loss in enumerate(losses, first):
                    session.report(step, 10, loss=loss)
                    if session.checkpoint_due(step):
                        session.checkpoint(step, counter=Counter(step))
                    if session.should_stop:
                        break
            agent.wait_for_end()
            return step, [one["ended_by"]["step"] for one in agent.of("leaving")]

    assert attempt(1, [1.0, 3.0, 3.0], 0) == (2, [2])
    checkpoint = str(tmp_path / "output" / "checkpoint-2")
    expected = (5, []) if done else (3, [2])
    assert attempt(3, [1.0, 1.0, 1.0], int(done), BATON_RESUME_FROM=checkpoint) == expected


def test_a_checkpoint_is_no_second_report_of_its_step(tmp_path: Path) -> None:
    """The save event brought the step's metrics once more: windows held them twice."""
    rules = "rules: [{name: third, when: count(loss) == 3, do: stop}]"
    with begun(tmp_path, rules) as session:
        for step in range(1, 4):
            session.report(step, 10, loss=1.0)
            if session.checkpoint_due(step, every=1):
                session.checkpoint(step, counter=Counter(step))
            assert session.should_stop == (step == 3)


RULES = {
    "rules": [
        {"name": "for", "when": "loss > 2", "for": "3 checks", "do": {"log": "{loss}"}},
        {"name": "of", "when": "loss > 2", "for": "3 of 5", "do": {"log": "x"}, "cooldown": "2 steps"},
        {"name": "seconds", "when": "loss > 1", "for": "3s", "do": {"log": "x"}},
        {"name": "cooldown", "when": "loss > 1", "do": {"log": "x"}, "cooldown": "5s"},
        {"name": "hysteresis", "when": "loss > 3", "clear": "loss < 1", "do": {"log": "x"}},
        {"name": "best", "when": "since_best(loss) >= 4", "do": {"log": "x"}, "cooldown": "3 checks"},
        {"name": "ema", "when": "loss > 1.5 * ema(loss, 5)", "do": {"log": "x"}},
        {"name": "zscore", "when": "abs(zscore(loss, 6)) > 1.2", "do": {"log": "x"}},
        {"name": "median", "when": "median(loss, 7) > 1.9", "do": {"log": "x"}},
        {"name": "once", "when": "loss > 0", "once": True, "warmup": "4 steps", "do": {"log": "x"}},
        {"name": "every", "when": "loss > 1", "every": "3 steps", "do": {"log": "x"}},
        {"name": "saved", "when": "loss > 1", "on": ["save"], "do": {"log": "x"}, "cooldown": "2 checks"},
        {"name": "started", "when": "missing(loss)", "on": ["start"], "do": {"log": "x"}},
        {"name": "epoch", "when": "loss > 0", "on": ["epoch"], "do": {"log": "x"}},
        {"name": "rate", "when": "falling(loss, 2)", "do": {"set": {"knob": "lr", "factor": 0.5}}},
        {"name": "wall", "when": "wall > 15s and loss > 2", "do": {"log": "x"}, "max_fires": 2},
        {"name": "late", "when": "eval.f1 > 0.5", "do": {"log": "x"}},
    ]
}
LOSSES = [1.0, 2.5, 3.5, 2.2, 2.1, 0.9, 0.8, 2.6, 1.9, 2.7, 4.0, 0.5, 2.2, 2.3, 2.4, 2.9, 3.3, 1.1, 0.7, 5.0]


class Rate:
    """A knob that is in the checkpoint."""

    value = 1.0

    def read(self) -> float:
        return self.value

    def write(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Runs:
    """Trainings that are killed and go on; time stands still between them."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path = tmp_path
        self.decisions: list[tuple[Any, ...]] = []
        self.rates: list[float] = []
        self.clock = Clock(0.0)
        original = Steering.__init__
        runs = self

        def init(steering: Steering, loop: Any, peers: Any, **more: Any) -> None:
            original(steering, loop, peers, clock=runs.clock, **more)
            tell = steering.engine._on_decision

            def told(decision: dict[str, Any]) -> None:
                if decision["type"] != "rule.updated":
                    runs.decisions.append(
                        tuple(map(str, (decision[name] for name in ("type", "rule", "step", "operands"))))
                        if "operands" in decision
                        else tuple(map(str, decision.values()))
                    )
                tell(decision)

            steering.engine._on_decision = told

        monkeypatch.setattr(Steering, "__init__", init)

    def run(self, first: int, last: int) -> None:
        """Steps of one process, which is killed after the last one: nothing of it is closed."""
        session = begun(self.tmp_path, json.dumps(RULES), resume=True)
        rate, counter = Rate(), Counter()
        session.steering.offer(knobs={"lr": rate})
        assert session.resume(counter=counter, rate=rate) == first - 1
        for step in range(first, last + 1):
            self.clock.now += 1.0 + (step % 3) / 8
            counter.value = step
            session.report(step, len(LOSSES), loss=LOSSES[step - 1], epoch=step / 4)
            if step % 5 == 0:
                session.steering.evaluated(step, loss=LOSSES[step - 1] / 2, f1=step / 30)
            assert session.checkpoint_due(step, every=1)
            assert session.checkpoint(step, counter=counter, rate=rate) is not None
            self.rates.append(rate.value)
        session.steering._closed = True  # as if killed: no event of the end
        session.close()


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    with monkeypatch.context() as patch:
        runs = Runs(tmp_path / "whole", patch)
        runs.tmp_path.mkdir()
        runs.run(1, len(LOSSES))
    return runs


@pytest.mark.parametrize("killed_after", [[step] for step in range(1, len(LOSSES))] + [list(range(1, len(LOSSES)))])
def test_killed_after_any_step_a_training_decides_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Runs, killed_after: list[int]
) -> None:
    runs = Runs(tmp_path, monkeypatch)
    first = 1
    for last in (*killed_after, len(LOSSES)):
        runs.run(first, last)
        first = last + 1
    # The save event of the last step before a kill is heard by the killed process and by the one that goes on.
    found = list(dict.fromkeys(runs.decisions))
    assert found == list(dict.fromkeys(expected.decisions))
    assert runs.rates == expected.rates
    rules = {decision[1] for decision in found if decision[0] == "rule.fired"}
    assert rules == {one["name"] for one in RULES["rules"]}, "each of them decided something"


def test_checkpoints_of_before_there_were_rules_resume_and_those_with_rules_resume_without(tmp_path: Path) -> None:
    def go(rules: str | None, first: int) -> Path:
        with begun(tmp_path, rules, resume=True) as session:
            assert session.resume(counter=Counter()) == first - 1
            session.report(first, 10, loss=1.0)
            path = session.checkpoint(first, counter=Counter(first))
            assert path is not None
            return path

    rules = "rules: [{name: r, when: loss > 5, do: stop}]"
    assert set(verify(go(None, 1)).states) == {"counter"}
    assert set(verify(go(rules, 2)).states) == {"counter", "steering"}
    assert set(verify(go(None, 3)).states) == {"counter"}
    assert set(verify(go(rules, 4)).states) == {"counter", "steering"}


def test_a_state_of_the_users_own_cannot_be_called_as_the_sessions(tmp_path: Path) -> None:
    """The session's own state silently replaced the script's."""
    with begun(tmp_path) as session, pytest.raises(SessionError, match="steering"):
        session.checkpoint(1, steering=Counter())


def test_without_rules_a_step_costs_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path) as session:
        calls: list[str] = []
        for name in (
            "report_step",
            "report_event",
            "contribution",
            "receive_rows",
            "share",
            "_arrived",
            "_report_statuses",
        ):
            monkeypatch.setattr(session.steering, name, lambda *_, name=name, **__: calls.append(name))
        for step in range(1, 100):
            session.report(step, 100, loss=1.0)
            session.checkpoint_due(step)
            assert not session.should_stop
        assert calls == []


def test_every_hook_action_is_called_with_the_order(start: Callable[..., Session], tmp_path: Path) -> None:
    called: list[tuple[str, int]] = []
    with begun(tmp_path, "rules: [{name: r, when: loss > 1, do: {hook: mine}}]") as session:
        session.steering.offer(hooks={"mine": lambda order: called.append((order.rule, order.step))})
        for step in range(1, 4):
            session.report(step, 10, loss=2.0)
    assert called == [("r", 1)]


@pytest.mark.parametrize("late", [False, True])
def test_a_save_says_by_which_tag_it_is_to_be_kept(tmp_path: Path, late: bool) -> None:
    """A `save` puts its tag on the checkpoint of its step, or on the next one if that step is already saved."""
    with begun(tmp_path, "rules: [{name: r, when: eval.loss < 1, do: {save: {tag: good}}}]") as session:
        for step in range(1, 5):
            session.report(step, 10, loss=1.0)
            if not late:
                session.steering.evaluated(step, loss=0.5 if step == 2 else 2.0)
            if session.checkpoint_due(step):
                session.checkpoint(step, counter=Counter(step))
            if late and step == 2:
                session.checkpoint(step, counter=Counter(step))
                session.steering.evaluated(step, loss=0.5)
                assert session.checkpoint(step, counter=Counter(step)) is not None
    found = {path.name: read_marker(path).tag for path in (tmp_path / "output").glob("checkpoint-*")}
    assert found == ({"checkpoint-2": "", "checkpoint-3": "good"} if late else {"checkpoint-2": "good"})
