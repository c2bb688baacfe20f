"""Presets: rules that every training has; they alert about probable failures and change nothing.

The worker's agent evaluates them on the training's reports (at most five a second) and every ten seconds. A document
disables all of them by `presets: off`, or one by its name.
"""

from __future__ import annotations

DOCUMENT = """\
# Presets only send alerts. To act on a condition, copy it into a rule of your own with another name.
# A preset sends at most three alerts in an attempt, and one in each attempt after a job's tenth.

metrics:
  # Only the agent knows these metrics. While a time does not count, it is 0.
  step.age: {kind: duration}    # since the newest step; 0 before the first, after the last, and during a phase
  phase.age: {kind: duration}   # since the last sign of life in a phase between steps or a checkpoint upload
  still: {kind: duration}       # since the last sign of life
  step.gap: {kind: duration}    # between the newest two reported steps: many loops do not report every step
  step.usual: {kind: duration}  # median of the newest 50 gaps; unknown before 20 gaps
  # Levels are medians of 20 reports each; unknown before 16 levels.
  loss.level: {}                # the lowest of the newest four, so that a spike within 80 reports has no effect
  loss.before: {}               # the level eight before the newest
  loss.jump: {}                 # rise since loss.before, in typical changes between two levels
  loss.lost: {}                 # lost share of the way from the worst to the best level
  checkpoints.missed: {}        # checkpoints that the script deleted before the agent could store them

rules:
  # A NaN loss usually means that the weights are lost. The preset ignores the norm of the gradients, because mixed
  # precision makes the norm infinite now and then and skips that step.
  - name: preset-nonfinite
    when: not isfinite(coalesce(loss, 0)) or not isfinite(coalesce(eval.loss, 0))
    cooldown: 10m
    clear: isfinite(coalesce(loss, 0)) and isfinite(coalesce(eval.loss, 0))
    max_fires: 3
    severity: error
    do: {alert: "the loss is {loss} (that of an evaluation: {eval.loss})"}

  # The training suddenly loses a third of its progress, for longer than a spike lasts. Restarts of the learning rate,
  # new data and noise lose less or recover sooner. A loss that wanders or oscillates by nature (random walks,
  # adversarial networks) does not jump by twenty typical changes within 160 reports: in trials, 15 was the maximum of
  # healthy trainings and 25 the minimum of diverged ones. The preset does not detect a slow loss of progress.
  - name: preset-divergence
    when: loss.lost > 0.33 and loss.jump > 20
    cooldown: 1h
    clear: loss.lost < 0.2
    max_fires: 3
    severity: error
    do: {alert: "the loss went up from {loss.before:.4g} to {loss.level:.4g} and stays there"}

  # A step takes twenty times the usual time, and more than ten minutes: slow steps, garbage collections and refilled
  # caches take less. While the usual time is unknown, the limit is an hour, because the first steps compile. The limit
  # is also twice the longest pause so far, because an unreported evaluation may recur, or two hours before the first
  # pause, because a script may report once an epoch. A reported phase between steps (`session.phase`) may last two
  # hours without a sign of life.
  - name: preset-stuck
    when: >-
      step.age > 10m and step.age > 20 * coalesce(step.usual, 3m) and step.age > 2 * coalesce(best(step.gap, max), 1h)
      or phase.age > 2h
    cooldown: 1h
    clear: step.age < 10m and phase.age < 2h
    max_fires: 3
    severity: error
    do: {alert: "no step for {still}, usual {step.usual}"}

  # The training waited for batches for more than half of ten minutes, therefore the GPU could do twice the work. Cache
  # fills of the first epoch and single slow files take less than ten minutes.
  - name: preset-starved
    when: mean(data.wait, 10m) > 0.5 * mean(step.time, 10m)
    cooldown: 1h
    clear: mean(data.wait, 10m) < 0.3 * mean(step.time, 10m)
    max_fires: 3
    do: {alert: "more than half of the time goes by waiting for data: {data.wait} of a step's {step.time}"}

  # No sample of 15 minutes shows a GPU above 5 %, although the training reports steps or has used a GPU. Loading,
  # downloading and evaluating do not leave the GPUs idle for that long.
  - name: preset-gpu-idle
    when: max(gpu.util, 15m) < 5 and (count(step.time) > 0 or coalesce(best(gpu.util), 0) >= 5)
    cooldown: 1h
    max_fires: 3
    do: {alert: "no GPU has done anything for 15 minutes"}

  # A script without a Baton session deletes its checkpoints before the agent can store them. One deletion in an attempt
  # is tolerable; after a second one, an interruption could cost all progress.
  - name: preset-rotation
    when: checkpoints.missed > 1
    cooldown: 1h
    clear: checkpoints.missed < 2
    max_fires: 3
    severity: error
    do: {alert: "the script has deleted {checkpoints.missed:.0f} checkpoints before they could be stored"}
"""
"""The presets as a rule document."""

NAMES = (
    "preset-nonfinite",
    "preset-divergence",
    "preset-stuck",
    "preset-starved",
    "preset-gpu-idle",
    "preset-rotation",
)
"""Names of the presets, reserved in all other documents."""
