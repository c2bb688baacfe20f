"""Provide the object by which a training script takes part in an elastic training::

outer = session.elastic(model, optimizer, inner_steps=100)
done = session.resume(model=model, optimizer=optimizer, elastic=outer)
outer.start()
for step, batch in ...:
    train_step(batch)
    outer.step(tokens=batch.numel())
    if outer.checkpoint_due:
        session.checkpoint(step, model=model, optimizer=optimizer, elastic=outer)
outer.leave()
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.world import JoinRequest
from gpu_client.elastic.codecs import CODECS
from gpu_client.elastic.data.leased_shards import LeasedShards
from gpu_client.elastic.data.local_shards import require_same_plan
from gpu_client.elastic.data.shard_plan import ShardPlan
from gpu_client.elastic.engines.engine import Engine
from gpu_client.elastic.errors import ElasticSetupError, StateLostError
from gpu_client.elastic.membership.world_calls import WorldCalls
from gpu_client.elastic.outer_optimizer import OUTER_LR, OUTER_MOMENTUM, OuterOptimizer, OuterState
from gpu_client.elastic.parameters import (
    BUCKET_VALUES,
    TrainedParameters,
    describe_program,
    find_sharded_modules,
    split_buckets,
)
from gpu_client.elastic.recovery.state_transfer import StateSource, StateTransfer
from gpu_client.elastic.rounds.epoch_protocol import ElasticEvent, RoundTiming
from gpu_client.elastic.rounds.local_progress import Contribution, LocalProgress
from gpu_client.elastic.rounds.member_status import PROTOCOL
from gpu_client.elastic.rounds.outer_replica import OuterReplica
from gpu_client.elastic.rounds.round_protocol import RoundProtocol
from gpu_client.elastic.rounds.round_runner import EngineTimeouts, RoundRunner
from gpu_client.elastic.rounds.world_metrics import RoundObserver, SilentObserver, choose_metrics

DEFAULT_GRACE_S = 30.0
DEFAULT_MIX = 0.5
LEAVE_SHARE = 2 / 3
"""Share of the grace of a stop for the last rounds; a checkpoint may follow."""

STOP_POLL_S = 0.25
"""Seconds between looks at a request to stop while the training waits."""

log = logging.getLogger("baton.elastic")


@dataclass(frozen=True)
class ElasticNode:
    """Connections of one node. engine_name, codec: words of `NodeProgram`, equal at all nodes."""

    node: str
    engine: Engine
    world: WorldCalls
    transfer: StateTransfer
    addresses: tuple[str, ...] = ()
    certificate: str = ""
    engine_name: str = "wire"
    codec: str = "int8"
    timing: RoundTiming = field(default_factory=RoundTiming)
    timeouts: EngineTimeouts = field(default_factory=EngineTimeouts)
    bucket_values: int = BUCKET_VALUES


class ElasticOuter:
    """Outer loop of DiLoCo around the inner steps of a training script.

    inner_steps: steps between two averages of a parameter, the same at all nodes. fragments: parts of the model, one of
    which each round averages; a round is due after inner_steps / fragments steps. round_s: seconds after which a round
    is due in any case, for nodes of different speed. overlap: train on during a round instead of waiting, by default
    with fragments; the result then arrives some steps later, and the node keeps the share `mix` of its own parameters.
    on_event: receives incidents, in the round thread.
    parameters: of a model in parts; by default the whole model's. Buffers such as running means stay local.
    """

    copies_state = True
    """`load_state_dict` keeps no given tensor, which may therefore map a file."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        node: ElasticNode,
        *,
        inner_steps: int = 100,
        round_s: float | None = None,
        fragments: int = 1,
        overlap: bool | None = None,
        mix: float = DEFAULT_MIX,
        outer_lr: float = OUTER_LR,
        outer_momentum: float = OUTER_MOMENTUM,
        on_event: Callable[[ElasticEvent], None] | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
        grace_left_s: Callable[[], float | None] = lambda: None,
        observer: RoundObserver | None = None,
        parameters: TrainedParameters | None = None,
    ) -> None:
        if inner_steps < 1:
            raise ElasticSetupError(f"inner_steps is {inner_steps}", "Train at least 1 step between rounds")
        if fragments < 1 or inner_steps % fragments:
            problem = f"inner_steps is {inner_steps} and fragments is {fragments}"
            raise ElasticSetupError(problem, "Make inner_steps a multiple of fragments")
        if not 0 <= mix < 1:
            raise ElasticSetupError(f"mix is {mix}", "Use a share of at least 0 and below 1")
        self._parameters = parameters or TrainedParameters(
            model.named_parameters(), sharded=find_sharded_modules(model)
        )
        self._parameters.require_whole()
        self._optimizer = optimizer
        if fragments > self._parameters.values:
            problem = f"fragments is {fragments}, and the model has {self._parameters.values} parameters"
            raise ElasticSetupError(problem, "Use fewer fragments")
        self._inner_steps = inner_steps // fragments
        """Steps between rounds."""
        self._round_s = round_s
        self._overlap = fragments > 1 if overlap is None else overlap
        self._on_event = on_event
        self._is_stopping = is_stopping
        self._grace_left_s = grace_left_s
        self._observer: RoundObserver = observer or SilentObserver()
        params = self._parameters.allocate()
        # Rounded to 4 bits, most small values would never reach the average.
        feedback = CODECS["int4"] if node.codec == "int4" else None
        buckets = split_buckets(self._parameters.values, min(node.bucket_values, self._parameters.values // fragments))
        self._progress = LocalProgress(
            params,
            feedback,
            self._parameters.allocate,
            self._parameters.stripe(buckets, fragments),
            mix if self._overlap else 0.0,
        )
        self._replica = OuterReplica(
            node.node,
            OuterState.begin(params),
            OuterOptimizer(outer_lr, outer_momentum),
            buckets,
            self._progress,
        )
        settings = {
            "protocol": PROTOCOL,
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "bucket_values": node.bucket_values,
            "fragments": fragments,
        }
        request = JoinRequest(
            node=node.node,
            addresses=list(node.addresses),
            certificate=node.certificate,
            program=describe_program(
                self._parameters,
                engine=node.engine_name,
                codec=node.codec,
                settings={**settings, "overlap": self._overlap, "mix": mix},
            ),
        )
        protocol = RoundProtocol(
            request,
            self._replica,
            clock=time.monotonic,
            timing=node.timing,
            tell=self._report_incident,
            traffic=lambda: node.engine.traffic.sent_bytes,
            observer=self._observer,
        )
        self._runner = RoundRunner(
            protocol.run(),
            self._progress,
            engine=node.engine,
            world=node.world,
            transfer=node.transfer,
            timeouts=node.timeouts,
        )
        self._steps = 0
        """Inner steps since the newest round has begun."""
        self._periods = 0
        self._reported: dict[str, object] = {}
        """Metrics since the newest contribution."""
        self._waited_s = self._stall = 0.0
        """Seconds that the training has waited for the present round; share in the newest round, in percent."""
        self._steps_left: float = math.inf
        self._last_round = 0
        self._stepped_at = self._round_began_at = time.monotonic()
        self._world = node.world
        self._synced_epoch = lambda: protocol.epochs.synced_epoch
        self._shards: LeasedShards | None = None
        self._data_plan = ""
        """Digest of the loaded state's order of shards; empty without shards."""
        self._has_started = False
        self._loaded_shift: torch.Tensor | None = None
        """Moves that the loaded model lacks; None without a loaded state."""

    # --- the training loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the world, and set the model's parameters to the group's state. Raises ElasticError.

        A new process begins without progress of its own; only if the group has the very state of the resumed
        checkpoint, the progress since then stays.
        """
        if self._has_started:
            return
        self._has_started = True
        if self._loaded_shift is None:
            self._parameters.read(self._progress.delta)
            self._replica.load(self._progress.delta, torch.zeros(self._parameters.values), 0)
        elif self._loaded_shift.numel():
            self._progress.delta.copy_(self._loaded_shift)
            self._parameters.add(self._progress.delta)
        self._progress.hold(self._parameters)
        self._runner.start()
        self._wait(lambda: self._progress.is_started or self._progress.is_stopping)
        if not self._progress.is_started:
            self.close()  # The training has no state of the group, therefore no round may take its steps.
            return
        self._progress.proceed(self._parameters)
        self._stepped_at = self._round_began_at = time.monotonic()

    def step(self, tokens: int = 1) -> None:
        """Count one finished inner step; take part in a round if a round is due. Raises ElasticError.

        tokens: weight of the step in the average, such as the number of tokens or samples. With an optimizer that
        accelerate has prepared, a call for each batch of an accumulated gradient counts as one step.
        """
        if tokens < 1:
            raise ElasticSetupError(f"tokens is {tokens}", "Pass the number of tokens or samples, at least 1")
        self._require_start()
        self._progress.tokens += tokens
        accumulation = getattr(self._optimizer, "gradient_state", None)
        if accumulation is not None and not accumulation.sync_gradients:
            return  # An optimizer of accelerate has not stepped: the gradients of this batch wait for the next ones.
        now = time.monotonic()
        self._progress.step_s, self._stepped_at = now - self._stepped_at, now
        self._steps += 1
        self._progress.follow(self._parameters)
        self._note_round(now)
        if self._is_due(now):
            self._take_part(now)
        self._steps_left -= 1
        while self._lacks_steps and self._wait_for_begin():
            pass

    def _require_start(self) -> None:
        if not self._has_started:
            raise ElasticSetupError("the elastic training has not started", "Call start() before the first inner step")
        self._raise_error()

    def _is_due(self, now: float) -> bool:
        is_late = self._round_s is not None and now >= self._round_began_at + self._round_s
        return self._steps >= self._inner_steps or is_late or self._progress.is_hurried

    def _note_round(self, now: float) -> None:
        """Count the steps anew once a round has begun, also a round that passes over this node."""
        if self._progress.periods != self._periods:
            self._stall = 100 * self._waited_s / max(now - self._round_began_at, 1e-9)
            self._waited_s = 0.0
            self._periods, self._steps, self._round_began_at = self._progress.periods, 0, now

    def _take_part(self, now: float) -> None:
        contribution = self._hand_over(now)
        if contribution is None:
            return
        if not self._overlap:
            self._wait(lambda: self._progress.contribution is not contribution or self._progress.is_apart)
        self._progress.proceed(self._parameters)
        self._stepped_at = time.monotonic()
        self._waited_s += self._stepped_at - now
        self._note_round(self._stepped_at)

    def limit_steps(self, steps: float, rounds: int) -> None:
        """Make steps wait for due rounds, so that the remaining steps suffice for all rounds.

        steps: number of steps that the loop can still make. rounds: number of the last round.
        """
        self._steps_left, self._last_round = steps, rounds

    @property
    def _lacks_steps(self) -> bool:
        """Return True if one more step before the next round would leave too few steps for the later rounds."""
        unfinished = self._replica.unfinished
        begun = self.round if unfinished is None else unfinished.round
        is_ahead = self._steps >= self._inner_steps
        least = (self._last_round - begun - 1) * self._inner_steps if is_ahead else 0
        is_over = self._progress.is_ended or self._is_stopping()
        return self._steps_left <= least and self.round < self._last_round and not is_over

    def _wait_for_begin(self) -> bool:
        """Wait for the begin or end of a round; return False if the group can take a delta, and the node has none."""
        progress, now = self._progress, time.monotonic()
        seen = progress.periods, progress.moves
        if self.tokens and self._hand_over(now):
            progress.proceed(self._parameters)
        is_waiting = progress.contribution is not None or progress.is_apart or progress.is_adopting
        if is_waiting:
            self._wait(lambda: (progress.periods, progress.moves) != seen or progress.is_stopping)
            progress.follow(self._parameters)
            self._stepped_at = time.monotonic()
            self._waited_s += self._stepped_at - now
        self._note_round(time.monotonic())
        return is_waiting

    def _hand_over(self, now: float) -> Contribution | None:
        contribution = self._progress.hand_over(
            self._parameters,
            now,
            lambda: choose_metrics({**self.data_metrics(), **self._reported}, self._observer.reads),
        )
        if contribution is not None:
            self._reported.clear()
            if contribution.is_refused:
                self._parameters.forget_moments(self._optimizer)
                message = "the delta of this node has NaN or infinity; the node goes on from the outer parameters"
                self._report_incident(ElasticEvent("delta_refused", self._replica.state.round, message))
        return contribution

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` is true. A node that is asked to stop meanwhile asks for an early round."""
        while not self._progress.wait_for(done, STOP_POLL_S):
            if self._is_stopping() and not self._progress.is_stopping:
                self._progress.notify(is_stopping=True)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._runner.error is not None:
            raise self._runner.error

    # --- the end -----------------------------------------------------------------------------------------------------

    def leave(self, timeout_s: float | None = None) -> None:
        """Contribute the progress since the newest round, leave the group, and end the round thread.

        The others do not wait until their own deltas are due: each contributes what it has. After `timeout_s`, by
        default two thirds of the grace of the stop, the node leaves without the round, and the others exclude the node.
        """
        if timeout_s is None:
            grace_s = self._grace_left_s()
            timeout_s = LEAVE_SHARE * (DEFAULT_GRACE_S if grace_s is None else max(0.0, grace_s))
        deadline = time.monotonic() + timeout_s
        progress = self._progress
        if self._runner.is_running:
            progress.notify(is_stopping=True)
            # A fragment needs a round of its own, and a round that has begun without this node ends the delta, too.
            while progress.wait_for(self._can_hand_over, deadline - time.monotonic()) and not progress.is_ended:
                progress.proceed(self._parameters)
                if not self.tokens:
                    break
                self._hand_over(time.monotonic())
            progress.notify(is_leaving=True)
            self._runner.join(max(0.0, deadline - time.monotonic()))
        self.close()
        progress.settle(self._parameters)

    def _can_hand_over(self) -> bool:
        """Return True if no delta waits for a round, and a group can take the next one, if there is any."""
        progress = self._progress
        return progress.contribution is None and not (self.tokens and (progress.is_apart or progress.is_adopting))

    def close(self) -> None:
        """End the round thread at once."""
        if self._shards is not None:
            self._shards.close()
        self._runner.stop()

    # --- data --------------------------------------------------------------------------------------------------------

    def shards(self, plan: ShardPlan) -> LeasedShards:
        """Return the shards of this node. Raises ElasticSetupError for a second order, or the loaded state's data."""
        if self._shards is not None:
            raise ElasticSetupError("the training has its shards already", "Call session.shards once, for all data")
        require_same_plan(self._data_plan, plan)
        self._data_plan = plan.sha256
        self._shards = LeasedShards(
            plan,
            self._replica,
            self._world,
            epoch=self._synced_epoch,
            contribute=self._contribute,
            is_stopping=self._is_stopping,
        )
        return self._shards

    def _contribute(self) -> None:
        """Take part in a round with the progress so far; without progress, count the finished shards at once."""
        self._require_start()
        self._note_round(time.monotonic())
        if self.tokens:
            self._take_part(time.monotonic())
        elif self._progress.contribution is None:
            self._replica.count(self._progress.data)

    # --- metrics ----------------------------------------------------------------------------------------------------

    def note_metrics(self, metrics: Mapping[str, object]) -> None:
        """Remember metrics that this node reports: the world's loss is the mean of the newest losses of all nodes."""
        self._reported.update(metrics)

    def data_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest round; empty before the first round of this process."""
        found = self._progress.world_metrics
        return {**found, "world.stall": self._stall} if found else {}

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """Return the id of this process in the world."""
        return self._replica.node

    @property
    def round(self) -> int:
        """Return the number of committed rounds."""
        return self._replica.state.round

    @property
    def tokens(self) -> int:
        """Return the weight of the progress that no round contains."""
        return max(self._progress.pending_tokens)

    @property
    def checkpoint_due(self) -> bool:
        """Return True at one member after each round, until this member has saved the state."""
        return self._progress.is_checkpoint_due

    @property
    def source(self) -> StateSource:
        """Return the outer state that the engine's listener serves to peers."""
        return self._replica

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the outer state; the model and its optimizer belong into the same checkpoint.

        While the node fetches the outer state, the call waits. Raises ElasticError if the fetch has ended without it.
        """
        with self._progress.changed:
            self._wait(lambda: not self._progress.is_adopting)
            if self._progress.is_adopting:
                raise StateLostError("the outer state of this node is incomplete: the node ended while fetching it")
            self._progress.is_checkpoint_due = False
            return {
                "round": self.round,
                # A model in float32 after a blocking round has the same bytes, and the store keeps equal tensors once.
                "params": self._parameters.split(self._replica.state.params.clone()),
                "momentum": self._replica.state.momentum.clone(),
                "shift": self._progress.pending_shift(),
                "residual": self._progress.residual.clone(),
                "steps": self._steps,
                "tokens": torch.tensor(self._progress.pending_tokens),
                "data": {
                    "plan_sha256": self._data_plan,
                    "trained": self._replica.data.model_dump_json(),
                    "pending": self._progress.data.model_dump_json(),
                },
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; call before `start` and the first step."""
        if self._has_started:
            raise ElasticSetupError("the elastic training has started", "Load the state before start() and step()")
        params = state["params"]
        if isinstance(params, Mapping):  # Checkpoints of earlier releases have one flat tensor.
            params = self._parameters.join(params)
        if params.numel() != self._parameters.values:
            problem = f"the checkpoint has {params.numel()} values, the model {self._parameters.values}"
            raise ElasticSetupError(problem, "Resume with the model of the checkpoint")
        self._replica.load(params, state["momentum"], int(state["round"]))
        if state["residual"].numel() == self._progress.residual.numel():
            self._progress.residual.copy_(state["residual"])
        self._steps = int(state["steps"])
        self._progress.load_tokens(torch.as_tensor(state["tokens"]).reshape(-1).tolist())
        self._loaded_shift = state["shift"].clone()
        data = state.get("data")  # Checkpoints of earlier releases have none.
        if data is not None:
            if self._shards is not None:
                require_same_plan(data["plan_sha256"], self._shards.plan)
            self._data_plan = data["plan_sha256"] or self._data_plan
            self._replica.data = DataProgress.model_validate_json(data["trained"])
            self._progress.data = DataProgress.model_validate_json(data["pending"])

    def _report_incident(self, event: ElasticEvent) -> None:
        log.info("round %d: %s: %s", event.round, event.kind, event.message)
        if self._on_event is not None:
            self._on_event(event)
