"""Teach Stable Diffusion 1.x, 2.x or SDXL one subject from a few pictures, by Dreambooth with LoRA.

Under Baton the job's parameters are the fields of `DreamboothConfig`. Without Baton, a file has the same fields, the
images are in `instance/` here, and results go to `output/`, unless --data-dir and --output-dir name other folders:

    accelerate launch -m gpu_client.training.dreambooth_lora --config job.yaml

After a kill at any time and a restart, the training continues; on a CPU in float32 the weights equal the weights of an
uninterrupted run bit for bit. The outputs are `pytorch_lora_weights.safetensors` for `pipeline.load_lora_weights`,
validation pictures with a grid of all, and the generated class images.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from diffusers.training_utils import compute_snr

from gpu_client.controller.learning_rate import LearningRate
from gpu_client.training.dreambooth.config import DreamboothConfig, read_config_file
from gpu_client.training.dreambooth.data.batches import PictureBatch, PictureBatches
from gpu_client.training.dreambooth.data.pictures import read_class_pictures, read_instance_pictures
from gpu_client.training.dreambooth.errors import DataError, DreamboothError, HubError
from gpu_client.training.dreambooth.model.base_model import Models, check_base_model, load_models
from gpu_client.training.dreambooth.model.device import check_machine, make_reproducible, select_device
from gpu_client.training.dreambooth.model.encoding import Encoder
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE, Lora
from gpu_client.training.dreambooth.model.optimization import Optimization
from gpu_client.training.dreambooth.sampling.class_images import ClassImages
from gpu_client.training.dreambooth.sampling.validation import ValidationPictures
from gpu_client.training.dreambooth.settings import LearningSettings, OrderWithSettings
from gpu_client.training.errors import CheckpointMismatchError, SessionError
from gpu_client.training.protocol import BAD_INPUT_EXIT_CODE, UNAVAILABLE_EXIT_CODE
from gpu_client.training.session.session import Session

EVERY_S = 30.0
"""Interval of progress lines in seconds; long, because each line reads the loss and waits for the GPU."""


class ProgressLines:
    """Log of step, loss and remaining time after the first step of this run, at intervals, and after the last step."""

    def __init__(self, done: int, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._done, self._total, self._clock = done, total, clock
        self._began_at = clock()
        self._logged_at: float | None = None
        if done >= total:
            log.info("all %d steps are trained already: the training is complete, its files are written again", done)

    def after(self, step: int, loss: torch.Tensor) -> None:
        """Record the end of a step. Call after every step."""
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < EVERY_S and step < self._total:
            return
        self._logged_at = now
        left_s = (now - self._began_at) / (step - self._done) * (self._total - step)
        left = f", about {left_s / 60:.0f} min left" if left_s >= 60 else ""
        log.info("step %d of %d, loss %.4f%s", step, self._total, loss.item(), left)


log = logging.getLogger("baton.training")

OUTPUT_DIR = Path("output")
"""Default output directory of a run without Baton."""


def train(session: Session, config: DreamboothConfig) -> bool:
    """Train from the newest checkpoint to the end. Returns False if the job stops earlier.

    Raises SessionError before the first step if this machine cannot train the job.
    """
    device = select_device()
    check_machine(config, device)
    check_base_model(config, session.data_dir)
    pictures = read_instance_pictures(config, session.data_dir)
    provided = read_class_pictures(config, session.data_dir)
    make_reproducible(config, device)

    models = load_models(config, device, session.data_dir)
    lora = Lora(models, config)
    encoder = Encoder(models, config)
    instance = PictureBatches(pictures, config, purpose="instance")
    prior = ClassImages(config, provided) if config.with_prior_preservation else None
    total = config.total_steps(instance.batches_per_epoch)
    optimization = Optimization(lora, config, total, device)
    epochs = total * config.gradient_accumulation_steps // instance.batches_per_epoch
    shown = ValidationPictures(config, models, encoder, lora, optimization, epochs=epochs)

    order = OrderWithSettings(instance, LearningSettings(config, total), session.resume_from)
    state = {"lora": lora, **optimization.states, "instance": order, "shown": shown, "cache": encoder.cache}
    state |= {"prior": prior} if prior is not None else {}
    session.steering.offer(knobs={"lr": LearningRate(optimization.optimizer, optimization.scheduler)})
    done = session.resume(**state)
    session.report(done, total)
    shown.show_again(session)

    if prior is not None and prior.missing:
        if not prior.complete(models, encoder, session):
            return False
        session.checkpoint(done, must=True, **state)  # Later attempts find the class images here.
    encoder.fill([instance, *([prior.batches] if prior else [])], _prompts(config, instance, prior), session.phase)

    loss_of = partial(compute_denoising_loss, models, encoder, config)
    lora.training(True)
    lines = None if session.job_id else ProgressLines(done, total)
    step = done
    for step in range(done + 1, total + 1):
        if shown.due(instance.epoch):
            shown.make(step - 1, instance.epoch, session)
        loss = accumulate(loss_of, instance, prior, optimization, config)
        learning_rate, norm = optimization.learning_rate, optimization.update()

        session.report(step, total, loss=loss, learning_rate=learning_rate, epoch=instance.epoch, grad_norm=norm)
        if lines is not None:
            lines.after(step, loss)
        # The checkpoint of step 0 precedes the filling of the caches, therefore the first step writes a checkpoint with
        # newly cached tensors.
        newly_cached = step == done + 1 and encoder.cache.made > 0
        if session.checkpoint_due(step, every=1 if newly_cached else config.checkpointing_steps) or step == total:
            # Pictures of the average replace the weights for a while, therefore no copy may overlap.
            session.checkpoint(step, overlap=not config.use_ema, **state)
        if session.should_stop and step < total:
            if session.finishing:
                break  # A rule ended the training.
            return False  # A stop request; the requested checkpoint is written.

    shown.make(step, instance.epoch, session)
    optimization.use_average()
    lora.export(session.output_dir / WEIGHTS_FILE, _metadata(session, config, models, step))
    shown.write_grid(session.output_dir)
    if prior is not None:
        prior.write(session.output_dir, models)
    return True


def accumulate(
    loss_of: Callable[[PictureBatch], torch.Tensor],
    instance: PictureBatches,
    prior: ClassImages | None,
    optimization: Optimization,
    config: DreamboothConfig,
) -> torch.Tensor:
    """Add up the gradients of one step's batches. Returns the mean of their losses."""
    losses = []
    for _ in range(config.gradient_accumulation_steps):
        loss = loss_of(next(instance))
        if prior is not None:
            loss = loss + config.prior_loss_weight * loss_of(next(prior))
        optimization.backward(loss)
        losses.append(loss.detach() / config.gradient_accumulation_steps)
    return torch.stack(losses).sum()


def compute_denoising_loss(
    models: Models, encoder: Encoder, config: DreamboothConfig, chosen: PictureBatch
) -> torch.Tensor:
    """Compute the mean error of the noise prediction over a batch."""
    schedule, generator = models.noise_schedule, chosen.generator
    latents = models.draw_latents(encoder.moments(chosen.items), generator)
    # The draw is on the CPU, so that every machine draws equal noise.
    noise = torch.randn(latents.shape, generator=generator).to(latents.device)
    timesteps = torch.randint(len(schedule), (len(latents),), generator=generator).to(latents.device)
    noisy = schedule.add_noise(latents, noise, timesteps)
    conditioning = encoder.conditioning([picture.prompt for picture, _ in chosen.items])
    with models.autocast():
        predicted = models.predict(noisy, timesteps, conditioning, chosen.items)
    velocity = schedule.config.prediction_type == "v_prediction"
    target = schedule.get_velocity(latents, noise, timesteps) if velocity else noise

    error = (predicted.float() - target.float()).square().mean(dim=1, keepdim=True)
    weights = torch.ones_like(error)
    if config.use_masks:
        masks = [placement.weights(picture, config.unmasked_weight) for picture, placement in chosen.items]
        weights = torch.stack(masks).to(error.device)
    per_image = (error * weights).sum(dim=(1, 2, 3)) / weights.sum(dim=(1, 2, 3)).clamp_min(1e-6)
    if config.snr_gamma is not None:
        per_image = per_image * compute_min_snr_weights(models, timesteps, config.snr_gamma)
    return per_image.mean()


def compute_min_snr_weights(models: Models, timesteps: torch.Tensor, gamma: float) -> torch.Tensor:
    """Compute Min-SNR weights (arXiv 2303.09556), which reduce the weight of timesteps with little noise."""
    snr = compute_snr(models.noise_schedule, timesteps)
    velocity = models.noise_schedule.config.prediction_type == "v_prediction"
    # The last timestep of some schedules is pure noise with a ratio of 0.
    return snr.clamp(max=gamma) / (snr + 1 if velocity else snr.clamp(min=1e-8))


def _prompts(config: DreamboothConfig, instance: PictureBatches, prior: ClassImages | None) -> list[str]:
    """List every prompt of the training once."""
    prompts = [picture.prompt for picture in instance.pictures]
    if prior is not None:
        prompts += [picture.prompt for picture in prior.batches.pictures]
    if config.validation_prompt is not None:
        prompts.append(config.validation_prompt)
    return list(dict.fromkeys(prompts))


def _metadata(session: Session, config: DreamboothConfig, models: Models, step: int) -> dict[str, str]:
    """Collect facts about the origin of the weights, for the file's header."""
    facts = {
        "job": session.job_id,
        "recipe": os.environ.get("BATON_RECIPE", ""),
        "step": str(step),
        "base_model": config.pretrained_model_name_or_path,
        "base_model_type": models.kind,
        "instance_prompt": config.instance_prompt,
        "class_prompt": config.class_prompt or "",
        "validation_prompt": config.validation_prompt or "",
        "resolution": str(config.resolution),
        "rank": str(config.lora_rank),
        "seed": str(config.seed),
    }
    return {f"baton.{name}": value for name, value in facts.items() if value}


def _check_images_are_named(config: DreamboothConfig) -> None:
    """Require the images' folder in a run without data directory. Raises DataError.

    Otherwise the run would train on all images below the working directory.
    """
    if not Path(config.instance_data_dir).is_dir():
        raise DataError(
            f"instance_data_dir: {config.instance_data_dir} is no directory here",
            "Name the folder of the images there, or pass --data-dir",
        )


def _exit_code(error: SessionError) -> int:
    if isinstance(error, (DreamboothError, CheckpointMismatchError)):
        return BAD_INPUT_EXIT_CODE
    return UNAVAILABLE_EXIT_CODE if isinstance(error, HubError) else 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A job that cannot be trained exits before the training with one line of explanation.

    The exit code is BAD_INPUT_EXIT_CODE for wrong parameters, data or checkpoints, UNAVAILABLE_EXIT_CODE for an
    unreachable hub, else 1.
    """
    parser = argparse.ArgumentParser(prog="dreambooth_lora", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--config", type=Path, help="YAML or JSON file with parameters; by default the job's parameters"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="directory of the images' folders; by default the current directory"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=OUTPUT_DIR, help="directory of the results, from which a restart continues"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        given = read_config_file(options.config) if options.config else None
        data_dir = options.data_dir or Path()
        with Session.start(output_dir=options.output_dir, data_dir=data_dir, resume=True) as session:
            config = DreamboothConfig.of(session.params if given is None else given)
            if options.data_dir is None and "BATON_DATA_DIR" not in os.environ:
                _check_images_are_named(config)
            if train(session, config):
                log.info("%s is written", session.output_dir / WEIGHTS_FILE)
    except SessionError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(_exit_code(error))


if __name__ == "__main__":
    main()
