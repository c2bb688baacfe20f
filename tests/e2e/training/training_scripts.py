"""Training scripts that the tests run in processes of their own, forked from a server that has imported torch and the
libraries once (importing takes longer than all the training here).
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset

from baton import BatchSampler, CheckpointWriteError, ResumableLoader, Session
from gpu_client.training.digits import main as digits

STEPS = 30


def make_model() -> nn.Module:
    """Make a model of two layers and dropout: the result depends on the random state."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))


class Noise(Dataset[torch.Tensor]):
    """Samples with random augmentation, drawn in a DataLoader worker."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 64) + torch.rand(8) + random.random() + float(np.random.rand())


def workers() -> None:
    """Train with two prefetching workers, and print "step N" after each step.

    The training waits after the step `hold_at` of the parameters for the file `go-on`.
    """
    torch.set_num_threads(1)
    session = Session.start(resume=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ResumableLoader(Noise(), BatchSampler(64, 8, seed=2), num_workers=2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    for step in range(session.resume(**state) + 1, STEPS + 1):
        model(next(loader)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}", flush=True)
        while step == session.params.get("hold_at") and not (session.output_dir / "go-on").exists():
            time.sleep(0.005)
        if session.checkpoint_due(step, every=10):
            session.checkpoint(step, **state)
        if session.should_stop:
            print(f"stopped: {session.stop_reason}", flush=True)
            return
    save_file(model.state_dict(), session.output_dir / "model.safetensors")


def accelerated() -> None:
    """A plain accelerate loop, in as many processes as the environment says. `stop_at` in the parameters: SIGTERM
    to the last rank after that step.
    """
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    session = Session.start(resume=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batches = BatchSampler(64, 8, seed=2, rank=accelerator.process_index, world_size=accelerator.num_processes)
    data = torch.linspace(-1, 1, 512).reshape(64, 8)
    state: dict[str, Any] = {"accelerator": accelerator, "batches": batches}
    done = session.resume(**state)
    for step in range(done + 1, STEPS + 1):
        loss = (model(data[next(batches)]) + torch.randn(4)).square().mean()  # each rank's own noise
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.report(step, STEPS, loss=loss)
        if step == session.params.get("stop_at") and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGTERM)
        if session.checkpoint_due(step, every=10):
            session.checkpoint(step, **state)
        if session.should_stop:
            print(f"rank {accelerator.process_index} left after step {step}: {session.stop_reason}", flush=True)
            break
    else:
        if accelerator.is_main_process:
            save_file(accelerator.unwrap_model(model).state_dict(), session.output_dir / "model.safetensors")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def one_fails() -> None:
    """Checkpoint with two processes of which the second cannot store its part: none may commit or wait forever."""
    torch.distributed.init_process_group("gloo")
    session = Session.start()
    model = nn.Linear(2, 2)
    session.checkpoint(1, model=model)
    try:
        session.checkpoint(2, model=model if session._ranks.first else object())
    except CheckpointWriteError as error:
        print(f"refused: {error}", flush=True)
    session.checkpoint(3, model=model)
    torch.distributed.destroy_process_group()


def trainer() -> None:
    """A Hugging Face Trainer on a tiny GPT-2. `stop_at`: SIGTERM to itself after that step."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from baton import BatonCallback

    torch.set_num_threads(1)
    session = Session.start(resume=True)
    callback = BatonCallback(session)
    stop_at = session.params.get("stop_at")

    class Interrupter(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if state.global_step + 1 == session.params.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)

    arguments = TrainingArguments(
        output_dir=str(session.output_dir),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=2,
        logging_steps=2,
        seed=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(0, 32, (20, 8), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    hf = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset, callbacks=[Interrupter(), callback])
    hf.train(resume_from_checkpoint=callback.resume_from)
    print(f"left after step {hf.state.global_step}: {session.stop_reason}", flush=True)
    if not session.should_stop:
        hf.save_model(str(session.output_dir / "final"))


def lightning_trainer() -> None:
    """Lightning on a net with dropout. `stop_at`, `kill_at`: SIGTERM or SIGKILL to itself in that step."""
    import lightning.pytorch as pl

    from baton import LightningCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            for name, number in (("stop_at", signal.SIGTERM), ("kill_at", signal.SIGKILL)):
                if self.global_step + 1 == session.params.get(name):
                    os.kill(os.getpid(), number)
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.set_num_threads(1)
    random.seed(5)
    np.random.seed(5)
    session = Session.start(resume=True)
    callback = LightningCallback(session, every=5)
    trainer = pl.Trainer(
        max_epochs=3, limit_train_batches=4, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        default_root_dir=session.output_dir,
    )  # fmt: skip
    module = Module()
    loader = ResumableLoader(Noise(), BatchSampler(64, 8, seed=2))
    trainer.fit(module, loader, ckpt_path=callback.resume_from)
    print(f"left after step {trainer.global_step}: {session.stop_reason}", flush=True)
    if not session.should_stop:
        save_file(module.net.state_dict(), session.output_dir / "model.safetensors")


def steered_trainer() -> None:
    """A Trainer under the rules of the file `rules`, in as many processes as the environment says. Its losses are
    what `losses` says of each rank. Prints the rate after each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from baton import BatonCallback

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.weight * 0 + x).sum(), "logits": x}

    class Rates(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            rates.append(more["optimizer"].param_groups[0]["lr"])

    class Ordered(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    torch.set_num_threads(1)
    rates: list[float] = []
    session = Session.start(rules=os.environ["BATON_OUTPUT_DIR"] + "-rules.yaml")
    losses = [float(loss) for together in zip(*session.params["losses"], strict=True) for loss in together]
    arguments = TrainingArguments(
        output_dir=str(session.output_dir), max_steps=len(session.params["losses"][0]),
        logging_steps=session.params.get("logging_steps", 1), per_device_train_batch_size=1,
        lr_scheduler_type="constant", learning_rate=1.0, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=False,
    )  # fmt: skip
    dataset = [{"x": torch.tensor(loss), "labels": torch.tensor(0.0)} for loss in losses]
    hf = Ordered(Given(), arguments, train_dataset=dataset, callbacks=[Rates(), BatonCallback(session)])
    hf.train()
    print(f"rates {rates}\nleft after step {hf.state.global_step}: {session.stop_reason}", flush=True)
    session.close()


def full_disk() -> None:
    """No file may grow beyond 64 KiB: the checkpoint fails, in words, and leaves nothing."""
    session = Session.start()
    model = nn.Linear(4, 4)
    session.checkpoint(1, model=model)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
    big = nn.Linear(400, 400)
    optimizer = torch.optim.SGD(big.parameters(), lr=0.1, momentum=0.9)
    big(torch.ones(1, 400)).sum().backward()
    optimizer.step()
    for states in ({"model": big}, {"optimizer": optimizer}):
        try:
            session.checkpoint(2, **states)
        except CheckpointWriteError as error:
            print(f"refused: {error}")
    print(sorted(path.name for path in Path(session.output_dir).iterdir()))


def sharded() -> None:
    """FSDP2 in as many processes as the environment says. `stop_at`: SIGTERM to the last rank after that step.
    `dump`: no step; what was resumed is gathered and written to the path of that name.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    several = "WORLD_SIZE" in os.environ
    if several:
        dist.init_process_group("gloo")
    session = Session.start(resume=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 1), nn.BatchNorm1d(1))
    if several:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    done = session.resume(**state)
    rank = dist.get_rank() if several else 0
    dump = session.params.get("dump")
    for step in range(done + 1, (0 if dump else STEPS) + 1):
        model(torch.randn(8, 8) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.report(step, STEPS)
        if step == session.params.get("stop_at") and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if session.checkpoint_due(step, every=10):
            print(f"rank {rank} at {step}: {session.checkpoint(step, overlap=True, **state)}", flush=True)
        if session.should_stop:
            print(f"rank {rank} left after step {step}: {session.stop_reason}", flush=True)
            break

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return value.full_tensor().clone() if isinstance(value, DTensor) else value

    if dump or not session.should_stop:
        gathered = {name: whole(holder.state_dict()) for name, holder in state.items()}
        if rank == 0:
            torch.save(gathered, dump or session.output_dir / "whole.pt")
    if several:
        dist.destroy_process_group()


def staged() -> None:
    """Stages a checkpoint every third step, some of them behind the training. Steps last a random while.

    `every` in the parameters: another interval.
    """
    torch.set_num_threads(1)
    session = Session.start(resume=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 200), nn.Dropout(0.2), nn.Linear(200, 200), nn.BatchNorm1d(200))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = BatchSampler(64, 8, seed=2)
    data = torch.linspace(-1, 1, 512).reshape(64, 8)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": batches}
    steps = session.params["steps"]
    for step in range(session.resume(**state) + 1, steps + 1):
        model(data[next(batches)] + torch.randn(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.report(step, steps)
        if session.checkpoint_due(step, every=session.params.get("every", 3)):
            session.checkpoint(step, overlap=step % 2 == 0, **state)
        if session.should_stop:
            return
    save_file(model.state_dict(), session.output_dir / "model.safetensors")
    save_file({str(key): value["exp_avg"] for key, value in optimizer.state_dict()["state"].items()},
              session.output_dir / "moments.safetensors")  # fmt: skip


def run(script: str, environment: Mapping[str, str], log: str) -> None:
    """Become a process group of its own, with exactly this BATON_* environment and its output in a file."""
    assert "tests.e2e.training.preloaded" in sys.modules, "the server has loaded no library: each process would"
    os.setsid()
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        del os.environ[name]
    os.environ.update(environment)
    scripts = {"digits": digits, "workers": workers, "accelerated": accelerated, "trainer": trainer}
    scripts |= {
        "steered_trainer": steered_trainer,
        "lightning_trainer": lightning_trainer,
        "full_disk": full_disk,
        "one_fails": one_fails,
        "sharded": sharded,
        "staged": staged,
    }
    scripts[script]()
    sys.stdout.flush()
