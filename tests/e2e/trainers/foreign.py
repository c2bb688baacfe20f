"""Trains a digit classifier with accelerate, as the example scripts of diffusers and accelerate do.

    accelerate launch foreign.py --train_data_dir DIR --output_dir DIR --resume_from_checkpoint latest

Every `--checkpointing_steps` steps the whole state goes to `<output_dir>/checkpoint-<step>`.
"""

import argparse
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_data_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_train_steps", type=int, default=400)
    parser.add_argument("--train_batch_size", type=int, default=64)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--checkpointing_steps", type=int, default=100)
    parser.add_argument("--checkpoints_total_limit", type=int, default=None)
    parser.add_argument("--resume_from_checkpoint", default=None, help="a directory's name, or `latest`")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_loader(args):
    digits = np.load(args.train_data_dir / "digits.npz")
    dataset = TensorDataset(torch.from_numpy(digits["images"]), torch.from_numpy(digits["labels"]))
    generator = torch.Generator().manual_seed(args.seed)
    return DataLoader(dataset, batch_size=args.train_batch_size, shuffle=True, generator=generator)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(8 * 64, 32), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(32, 10),
    )  # fmt: skip


def checkpoints_in(directory):
    found = [path for path in directory.iterdir() if path.name.startswith("checkpoint")]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def resume(accelerator, args):
    """Returns the step of the checkpoint, 0 without one."""
    if args.resume_from_checkpoint is None:
        return 0
    if args.resume_from_checkpoint == "latest":
        path = next(reversed(checkpoints_in(args.output_dir)), None)
    else:
        path = args.output_dir / args.resume_from_checkpoint
    if path is None:
        accelerator.print("No checkpoint to resume from. Starting a new training run.")
        return 0
    accelerator.print(f"Resuming from {path.name}")
    accelerator.load_state(path)
    return int(path.name.split("-")[1])


def save(accelerator, args, step):
    if not accelerator.is_main_process:
        return
    if args.checkpoints_total_limit is not None:
        there = checkpoints_in(args.output_dir)
        for path in there[: max(0, len(there) - args.checkpoints_total_limit + 1)]:
            shutil.rmtree(path)
    accelerator.save_state(args.output_dir / f"checkpoint-{step}")


def train(accelerator, args, model, optimizer, loader, scheduler):
    updates_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    step = resume(accelerator, args)
    first_epoch, updates_done = divmod(step, updates_per_epoch)
    model.train()
    for epoch in range(first_epoch, math.ceil(args.max_train_steps / updates_per_epoch)):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == first_epoch and updates_done:
            batches = accelerator.skip_first_batches(loader, updates_done * args.gradient_accumulation_steps)
        for images, labels in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % args.checkpointing_steps == 0:
                save(accelerator, args, step)
                accelerator.print(f"step {step}: loss {loss.item():.4f}")
            if step >= args.max_train_steps:
                return


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / args.max_train_steps))
    prepared = accelerator.prepare(model, optimizer, make_loader(args), scheduler)
    train(accelerator, args, *prepared)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        save_file(accelerator.unwrap_model(prepared[0]).state_dict(), args.output_dir / "model.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main()
